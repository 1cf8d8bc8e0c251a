// The page. Everything that comes from etcd becomes a text node: nothing is ever parsed as HTML.
const STALE_AFTER = 15000; // milliseconds; the server says something every 5 s
const MOODS = {
  good: ["running", "training", "finished", "live", "healthy"],
  busy: ["forming", "seating", "seated", "waiting", "asking", "called back", "spare", "idle", "opening", "empty"],
  bad: ["failed", "degraded", "unreadable", "away", "refused", "unclear", "missing", "lost", "needs a look",
    "leaving", "died", "expired", "closed"],
  going: ["draining"],
};
const main = document.getElementById("main");
const job = new URLSearchParams(location.search).get("job");
const look = { find: "", offset: 0 };
let source = null, told = null, leases = {}, heardAt = 0, about = {};

// Others' text may hold characters that nobody sees, or that reorder what stands around them. They are shown by number.
function visible(text) {
  return String(text).replace(/[^\P{C}\n\t]|[\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}

function make(tag, settings = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  const shown = children.filter((child) => child !== null && child !== undefined);
  node.append(...shown.map((child) => child instanceof Node ? child : visible(child)));
  return node;
}

function word(text, mood = Object.keys(MOODS).find((one) => MOODS[one].includes(text)) ?? "") {
  return make("span", { class: `word ${mood}` }, text);
}

function table(columns, rows) {
  const head = columns.map((column) => make("th", column.number ? { class: "number" } : {}, column.head));
  const body = rows.map((row) => make("tr", {}, ...columns.map((column) => {
    const value = column.of(row);
    const nothing = value === null || value === undefined || value === "";
    const kinds = [column.number && "number", column.short && "short", column.mono && "mono", nothing && "nothing"].filter(Boolean).join(" ");
    return make("td", { class: kinds, "data-head": column.head }, nothing ? "–" : value instanceof Node ? value : String(value));
  })));
  return make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

function fields(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return shown.length ? make("dl", {}, ...shown.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])) : null;
}

function pager(rows) {
  if (rows.found <= rows.rows.length) return null;
  const to = rows.offset + rows.rows.length;
  const go = (offset) => () => { look.offset = offset; open(); };
  const size = Math.max(rows.rows.length, 50);
  const back = make("button", { type: "button", on: { click: go(Math.max(rows.offset - size, 0)) } }, "‹ back");
  const on = make("button", { type: "button", on: { click: go(to) } }, "next ›");
  back.disabled = rows.offset === 0;
  on.disabled = to >= rows.found;
  return make("div", { class: "tools" }, back, on,
    make("span", { class: "dim" }, `${rows.offset + 1} to ${to} of ${rows.found}`));
}

function counts(of) {
  return make("span", { class: "counts" }, ...Object.entries(of).map(([name, count]) => {
    const shown = word(name);
    shown.append(` ${count}`);
    return shown;
  }));
}

// The one input is kept through all drawing, so that whoever types in it is not disturbed.
let typing = null;
const search = make("input", {
  type: "search", placeholder: "find", "aria-label": "find", id: "find",
  on: { input: () => { clearTimeout(typing); typing = setTimeout(() => { look.find = search.value; look.offset = 0; open(); }, 200); } },
});
const counted = make("div");
const tools = make("div", { class: "tools" }, counted, search);
counted.className = "counts";
const body = make("div");

function jobLink(name) {
  return make("a", { href: `./?${new URLSearchParams({ job: name })}` }, name);
}

function drawList(page) {
  counted.replaceChildren(counts(page.states));
  const columns = [
    { head: "job", of: (row) => jobLink(row.job) },
    { head: "state", of: (row) => word(row.state) },
    { head: "round", number: true, of: (row) => row.round },
    { head: "nodes", number: true, of: (row) => row.nodes },
    { head: "quorum", number: true, of: (row) => row.quorum },
    { head: "replicas", number: true, of: (row) => row.replicas },
    { head: "members", number: true, of: (row) => row.members },
    { head: "note", of: (row) => row.note },
  ];
  body.replaceChildren(page.jobs.total
    ? make("section", { class: "card" }, table(columns, page.jobs.rows), pager(page.jobs) ?? "")
    : make("p", { class: "card" }, `No job has keys below ${page.key_prefix}.`));
}

function nextDecision(what, group) {
  const said = { wait: "waits", publish: "is due", withheld: "is withheld" }[group.next.decision];
  const settled = group.healthy && group.next.decision === "wait" ? "settled" : group.next.decision;
  const rule = group.next.rule ? make("span", { class: "dim" }, ` [${group.next.rule}]`) : null;
  return make("p", { class: `next ${settled}` }, make("strong", {}, `Next ${what} ${said}: `), group.next.reason, rule);
}

function leaseCell(row) {
  const lease = leases[row.member];
  if (!lease) return "";
  return make("span", {}, make("progress", { value: lease.left, max: lease.ttl }), `${lease.left} of ${lease.ttl} s`);
}

const memberColumn = { head: "member", mono: true, of: (row) => row.member };
const nodeColumns = [
  { head: "rank", number: true, of: (row) => row.rank },
  { head: "host", of: (row) => row.host },
  { head: "standing", of: (row) => word(row.standing) },
  { head: "lease", of: leaseCell },
  { head: "since revision", number: true, of: (row) => row.since_revision },
  { head: "says", of: (row) => row.said },
  { head: "node", mono: true, of: (row) => row.node },
  memberColumn,
];
const replicaColumns = [
  { head: "rank", number: true, of: (row) => row.rank },
  { head: "replica", of: (row) => row.replica_id },
  { head: "standing", of: (row) => word(row.standing) },
  { head: "step", number: true, of: (row) => row.step },
  { head: "heals from", of: (row) => row.heals_from && `${row.heals_from} (${row.behind} behind)` },
  { head: "failed", number: true, of: (row) => row.commit_failures || "" },
  { head: "lease", of: leaseCell },
  { head: "ranks", number: true, of: (row) => row.world_size },
  { head: "address", mono: true, of: (row) => row.address },
  memberColumn,
];
const missingColumns = [
  { head: "rank", number: true, of: (row) => row.rank },
  { head: "who", of: (row) => row.replica_id ?? row.host },
  { head: "cause", of: (row) => row.cause || "nobody has said it yet" },
  memberColumn,
];

// What acts: a dialog asks first, with the name and the token, which are kept in this page's memory only.
const credentials = { who: "", token: "" };

function entry(label, settings) {
  const input = make("input", settings);
  return { input, row: make("label", {}, label, input) };
}

function ask(what, name, question, forcing) {
  const who = entry("your name", { autocomplete: "username", maxlength: "200" });
  const token = entry("token", { type: "password", autocomplete: "off" });
  const reason = entry("reason", { maxlength: "1000", placeholder: "for those who read it later" });
  const force = forcing ? entry(forcing, { type: "checkbox" }) : null;
  who.input.value = credentials.who;
  token.input.value = credentials.token;
  const answer = make("p", { role: "status" });
  const close = make("button", { type: "button", on: { click: () => dialog.remove() } }, "cancel");
  const go = make("button", { type: "button", class: "danger", on: { click: async () => {
    credentials.who = who.input.value.trim();
    credentials.token = token.input.value.trim();
    go.disabled = true;
    const forced = force ? { force: force.input.checked } : {};
    const [done, text] = await order({ what, job, name, who: credentials.who, reason: reason.input.value.trim(), ...forced });
    answer.textContent = visible(text);
    answer.className = done ? "good" : "bad";
    if (done) {
      go.remove();
      close.textContent = "close";
    }
    go.disabled = false;
  } } }, what);
  const dialog = make("dialog", { id: "order", on: { close: () => dialog.remove() } },
    make("h2", {}, question), who.row, token.row, reason.row, force?.row ?? "", answer, make("div", { class: "tools" }, go, close));
  document.body.append(dialog);
  dialog.showModal();
  (credentials.who ? reason : who).input.focus();
}

async function order(wanted) {
  try {
    const headers = { Authorization: `Bearer ${credentials.token}`, "Content-Type": "application/json" };
    const answer = await fetch("api/act", { method: "POST", headers, body: JSON.stringify(wanted) });
    const told = await answer.json();
    if (!answer.ok) return [false, told.error];
    return [told.did.length > 0, [...told.did, ...told.left.map((one) => `left alone: ${one}`)].join("; ")];
  } catch (error) {
    return [false, `nobody knows whether it was done: ${error.message}`];
  }
}

function orderButton(what, name, question, forcing = "") {
  return make("button", { type: "button", class: "order", on: { click: () => ask(what, name, question, forcing) } }, what);
}

const evictColumn = {
  head: "",
  of: (row) => orderButton("evict", row.member, `Evict ${row.host ?? row.replica_id}? Its lease ends now, and the others go on without it.`),
};
const drainColumn = {
  head: "",
  of: (row) => ["draining", "leaving", "over"].includes(row.standing) ? "" : orderButton("drain", row.node,
    `Drain ${row.host}? Its round is recalled, the others form a new one, and its agent ends without an error.`,
    "also if too few stay"),
};
const killColumn = {
  head: "",
  of: (row) => orderButton("kill", row.replica_id, `Kill ${row.replica_id}? The process of its manager ends.`),
};

function leftCell(row) {
  const left = Math.round(row.until - Date.now() / 1000);
  return left >= 0 ? `${left} of ${row.after} s` : `${-left} s overdue`;
}
const timerColumns = [
  { head: "rank", number: true, of: (row) => row.rank },
  { head: "host", of: (row) => row.host },
  { head: "pid", number: true, of: (row) => row.pid },
  { head: "scope", of: (row) => row.scope },
  { head: "standing", of: (row) => word(row.standing) },
  { head: "expires", of: (row) => new Date(row.until * 1000).toLocaleTimeString() },
  { head: "left", of: leftCell },
];

function timersCard(timers) {
  if (!timers.total) return null;
  const more = timers.found > timers.rows.length ? `, the first ${timers.rows.length}` : "";
  return make("section", { class: "card", id: "timers" },
    make("h2", {}, `Timers (${look.find ? `${timers.found} of ` : ""}${timers.total})${more}`),
    timers.rows.length ? table(timerColumns, timers.rows) : make("p", { class: "dim" }, "none"));
}

function groupCard(title, what, group, facts, columns) {
  const missing = group.missing, state = word(group.state);
  if (!group.healthy) state.classList.remove("good");
  return make("section", { class: "card" },
    make("div", { class: "title" }, make("h2", {}, title), state, counts(group.standings)),
    nextDecision(what, group),
    fields(facts),
    missing.total ? make("h3", {}, `missing (${missing.total})`) : null,
    missing.total ? table(missingColumns, missing.rows) : null,
    missing.found > missing.rows.length ? make("p", { class: "dim" }, `and ${missing.found - missing.rows.length} more`) : null,
    make("h3", {}, `members (${look.find ? `${group.members.found} of ` : ""}${group.members.total})`),
    group.members.rows.length ? table(columns, group.members.rows) : make("p", { class: "dim" }, "none"),
    pager(group.members));
}

function roundsCard(group) {
  const limits = group.max_nodes ? `${group.min_nodes} to ${group.max_nodes} nodes` : "";
  return groupCard(`Round ${group.number}`, "round", group, [
    ["seats", `${group.size}${limits ? ` (${limits})` : ""}`],
    ["bootstrap", group.size && !group.closed ? `${group.address}:${group.port}` : ""],
    ["closed", group.closed], ["recalled", group.recalled], ["round before", group.before],
  ], about.acts ? [...nodeColumns, evictColumn, drainColumn] : nodeColumns);
}

function quorumCard(group) {
  return groupCard(`Quorum ${group.id}`, "quorum", group, [
    ["replicas", `${group.size} (min_replicas ${group.min_replicas})`],
    ["step", String(group.max_step)],
    ["decided", group.created ? new Date(group.created * 1000).toLocaleString() : ""],
  ], about.acts ? [...replicaColumns, evictColumn, killColumn] : replicaColumns);
}

let past = null;
// Of a worker's failure the reason says it in a line; below it stands what else its agent knew.
function whyCell(row) {
  const worker = row.worker;
  if (!worker) return row.reason;
  const ended = worker.signal ? `signal ${worker.signal}` : worker.exit_code >= 0 ? `exit code ${worker.exit_code}` : "";
  return make("span", {}, row.reason, ended && !row.reason.includes(ended) ? ` (${ended})` : "",
    worker.traceback ? make("pre", { class: "traceback" }, worker.traceback) : null);
}
const eventColumns = [
  { head: "time", short: true, of: (row) => row.at ? new Date(row.at * 1000).toLocaleString() : "" },
  { head: "what", of: (row) => row.kind === "closed" && row.reason.startsWith("finished") ? word(row.kind, "good") : word(row.kind) },
  { head: "of", short: true, of: (row) => `${row.group === "quorums" ? "quorum" : "round"} ${row.number}` },
  { head: "who", of: (row) => row.who },
  { head: "why", of: whyCell },
  { head: "revision", number: true, of: (row) => row.revision },
];

function pastCard() {
  if (!past?.events.length) return null;
  const more = past.total > past.events.length ? `, the newest ${past.events.length} of ${past.total}` : "";
  return make("section", { class: "card" }, make("h2", {}, `What happened${more}`),
    make("p", { class: "next", id: "why" }, past.why), table(eventColumns, past.events));
}

function drawJob(page) {
  if (!page.exists) {
    counted.replaceChildren();
    body.replaceChildren(make("p", { class: "card" },
      past?.events.length
        ? "etcd has no key of this job but its history: it is over, and what it left has expired or was deleted."
        : "etcd has no key of this job: it never began, or was forgotten. It is shown here as soon as it begins."),
      pastCard() ?? "");
    return;
  }
  counted.replaceChildren(make("span", { id: "health" }), make("span", { class: "dim" }, `revision ${page.revision}`));
  if (about.acts && page.rounds && !page.rounds.closed) {
    counted.append(orderButton("close", "", `Close ${page.job}? The run ends for all of its nodes, each with an error.`));
  }
  const parts = [page.rounds && roundsCard(page.rounds), page.quorum && quorumCard(page.quorum)].filter(Boolean);
  const timers = timersCard(page.timers);
  if (!parts.length) parts.push(make("p", { class: "card" },
    "It has neither a rendezvous nor quorums: only a store, timers or heartbeats."));
  if (page.unreadable.total) parts.push(make("section", { class: "card" },
    make("h2", {}, `unreadable keys (${page.unreadable.total})`),
    table([{ head: "key", mono: true, of: (row) => row.key }, { head: "problem", of: (row) => row.problem }], page.unreadable.rows)));
  body.replaceChildren(...parts, timers ?? "", pastCard() ?? "");
}

function draw() {
  const link = document.getElementById("link"), lost = document.getElementById("lost");
  const silent = heardAt && Date.now() - heardAt > STALE_AFTER;
  const state = silent ? "lost" : source === null || !told ? "opening" : told.connected ? "live" : "lost";
  document.body.dataset.link = state;
  link.replaceChildren(word(state));
  // What is old may have been healthy. It is not said to be.
  const health = state !== "live" ? "unknown" : told.page?.healthy ? "healthy" : "needs a look";
  document.getElementById("health")?.replaceChildren(word(health));
  lost.hidden = state !== "lost";
  const since = told?.at ? ` What is below was so at ${new Date(told.at * 1000).toLocaleTimeString()}.` : "";
  if (silent) lost.textContent = `The page's own server does not answer.${since}`;
  else if (state === "lost") lost.textContent = `ETCD IS LOST: ${visible(told.error)}.${told.page ? since : ""}`;
}

function drawPage() {
  if (!told?.page) return draw();
  if (job === null) drawList(told.page);
  else drawJob(told.page);
  draw();
}

function open() {
  if (document.hidden) return; // it is opened again when somebody looks
  const path = job === null ? "api/jobs" : "api/job";
  const asked = { find: look.find, offset: look.offset, ...(job === null ? {} : { job }) };
  const before = source, mine = new EventSource(`${path}?${new URLSearchParams(asked)}`);
  source = mine;
  const heard = (use) => (event) => {
    before?.close(); // only now, so that the server's watch goes on
    if (mine !== source) return;
    heardAt = Date.now();
    use(JSON.parse(event.data));
  };
  mine.addEventListener("page", heard((found) => {
    // While etcd is lost, its last words stay; the time is that of the last page that was true.
    told = found.connected ? found : { ...found, at: told?.at && !found.connected ? told.at : found.at };
    drawPage();
  }));
  mine.addEventListener("past", heard((found) => {
    past = { ...past, ...found }; // it comes without events where those are the same
    drawPage();
  }));
  mine.addEventListener("beat", heard((found) => {
    leases = found.leases;
    drawPage();
  }));
  mine.addEventListener("error", () => {
    if (mine !== source) return;
    heardAt = heardAt || Date.now();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => { if (mine === source) open(); }, 2000);
  });
}

// A browser has six connections to a server for all of its tabs, and a stream takes one: a tab that nobody sees has none.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    source = null;
    heardAt = 0;
    told = null; // what was drawn stays, and does not say that it is live
    draw();
  } else if (source === null) {
    open();
  }
});

if (job !== null) {
  document.title = `${visible(job)} · ftcoord`;
  main.append(make("div", { class: "title" }, make("a", { href: "./" }, "jobs"), make("span", { class: "dim" }, "/"), make("h1", {}, job)));
} else {
  main.append(make("div", { class: "title" }, make("h1", {}, "Jobs")));
}
main.append(tools, body);
setInterval(draw, 1000);
draw();
open();
fetch("api/about").then((answer) => answer.json()).then((found) => {
  about = found;
  document.getElementById("where").textContent = visible(`${about.endpoints.join(", ")} ${about.key_prefix}`);
  document.getElementById("about").textContent = `ftcoord ${about.version} on ${about.host}; ${about.acts ? "who has the token may act" : "read-only"}`;
  drawPage();
}).catch(() => draw());
