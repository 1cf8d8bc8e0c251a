// The page. Everything that comes from etcd becomes a text node: nothing is ever parsed as HTML.
const STALE_AFTER = 15000; // milliseconds; the server sends a report every 5 s
const MOODS = {
  good: ["running", "training", "finished", "stopped", "live", "healthy"],
  busy: ["forming", "seating", "seated", "waiting", "asking", "called back", "spare", "idle", "opening", "empty"],
  bad: ["failed", "degraded", "unreadable", "away", "refused", "missing", "lost", "needs a look",
    "leaving", "died", "expired", "closed"],
  going: ["draining", "stopping"],
};
const main = document.getElementById("main");
const job = new URLSearchParams(location.search).get("job");
const look = { find: "", offset: 0 };
let source = null, latest = null, past = { history: { events: [] }, total: 0 }, receivedAt = 0, about = {};

// Others' text may hold invisible characters, or some that reorder their neighbours. They are shown by number.
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
  node.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : visible(child)));
  return node;
}

const moodOf = (text) => Object.keys(MOODS).find((one) => MOODS[one].includes(text)) ?? "";

function word(text, mood = moodOf(text), more = "") {
  return make("span", { class: `word ${mood}` }, text, more);
}

// A column of a table. `of` is a field of a row, or makes a row's cell; `kind` is the cell's class.
function column(head, of = head, kind = "") {
  return { head, kind, of: typeof of === "string" ? (row) => row[of] : of };
}

const number = (head, of = head) => column(head, of, "number");
const state = (name) => column(name, (row) => word(row[name]));
const act = (of) => column("", of);

function table(columns, rows) {
  if (!rows.length) return dim("none");
  const head = columns.map(({ head, kind }) => make("th", kind === "number" ? { class: kind } : {}, head));
  const body = rows.map((row) => make("tr", {}, ...columns.map(({ head, kind, of }) => {
    const value = of(row) ?? "", nothing = value === "";
    return make("td", { class: nothing ? `${kind} nothing` : kind, "data-head": head }, nothing ? "–" : value);
  })));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

function fields(pairs) {
  const shown = pairs.filter(([, value]) => value !== "");
  return make("dl", {}, ...shown.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

const dim = (text) => make("span", { class: "dim" }, text);
const button = (settings, text, click) => make("button", { type: "button", ...settings, on: { click } }, text);
const note = (text) => make("p", { class: "card" }, text);

function pager(rows, count) {
  if (count.found <= rows.length) return null;
  const to = count.offset + rows.length, step = Math.max(rows.length, 50);
  const go = (offset) => () => { look.offset = offset; open(); };
  const back = button({}, "‹ back", go(Math.max(count.offset - step, 0))), on = button({}, "next ›", go(to));
  back.disabled = count.offset === 0;
  on.disabled = to >= count.found;
  return make("div", { class: "tools" }, back, on, dim(`${count.offset + 1} to ${to} of ${count.found}`));
}

function counted(states) {
  return make("span", { class: "counts" }, ...Object.entries(states).map(([name, count]) => word(name, moodOf(name), ` ${count}`)));
}

// How many rows there are: of how many found where something is searched.
const size = (count) => `(${look.find ? `${count.found} of ` : ""}${count.total})`;

// The one input is kept through all drawing, so that typing in it is not disturbed.
let typing = null;
const search = make("input", {
  type: "search", placeholder: "find", "aria-label": "find", id: "find",
  on: { input: () => { clearTimeout(typing); typing = setTimeout(() => { look.find = search.value; look.offset = 0; open(); }, 200); } },
});
const summary = make("div", { class: "counts" });
const tools = make("div", { class: "tools" }, summary, search);
const body = make("div");

const jobLink = (row) => make("a", { href: `./?${new URLSearchParams({ job: row.job })}` }, row.job);
const jobColumns = [
  column("job", jobLink), state("state"), number("round"), number("nodes"), number("quorum"), number("replicas"),
  number("members"), column("note"),
];

function drawList({ report, counts }) {
  summary.replaceChildren(counted(counts.jobs.states));
  body.replaceChildren(counts.jobs.total
    ? make("section", { class: "card" }, table(jobColumns, report.jobs), pager(report.jobs, counts.jobs))
    : note(`No job has keys below ${report.key_prefix}.`));
}

function nextDecision(what, group) {
  const does = { wait: "waits", publish: "is due", withheld: "is withheld" }[group.next.decision];
  const settled = group.healthy && group.next.decision === "wait" ? "settled" : group.next.decision;
  const rule = group.next.rule ? dim(` [${group.next.rule}]`) : null;
  return make("p", { class: `next ${settled}` }, make("strong", {}, `Next ${what} ${does}: `), group.next.reason, rule);
}

function leaseCell(row) {
  if (row.lease_ttl === null) return "";
  return make("span", {}, make("progress", { value: row.lease_left, max: row.lease_ttl }), `${row.lease_left} of ${row.lease_ttl} s`);
}

const nodeColumns = [
  number("rank"), column("host"), state("standing"), column("lease", leaseCell), number("since revision", "since_revision"),
  column("reason", "said"), column("node", "node", "mono"), column("member", "member", "mono"),
];
const replicaColumns = [
  number("rank"), column("replica", "replica_id"), state("standing"), number("step"),
  column("heals from", (row) => row.heals_from && `${row.heals_from} (${row.behind} behind)`),
  number("failed", (row) => row.commit_failures || ""), column("lease", leaseCell), number("ranks", "world_size"),
  column("address", "address", "mono"), column("member", "member", "mono"),
];
const missingColumns = [
  number("rank"), column("who", (row) => row.replica_id ?? row.host), column("cause", (row) => row.cause || "not known yet"),
  column("member", "member", "mono"),
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
  const close = button({}, "cancel", () => dialog.remove());
  const go = button({ class: "danger" }, what, async () => {
    credentials.who = who.input.value.trim();
    credentials.token = token.input.value.trim();
    go.disabled = true;
    const forced = force ? { force: force.input.checked } : {};
    const [done, text] = await order({ what, job, name, who: credentials.who, reason: reason.input.value.trim(), ...forced });
    answer.textContent = visible(text);
    answer.className = done ? "good" : "bad";
    go.disabled = false;
    if (done) go.remove();
    if (done) close.textContent = "close";
  });
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
    const found = await answer.json();
    if (!answer.ok) return [false, found.error];
    return [found.did.length > 0, [...found.did, ...found.left.map((one) => `left alone: ${one}`)].join("; ")];
  } catch (error) {
    return [false, `it is not known whether it was done: ${error.message}`];
  }
}

function orderButton(what, name, question, forcing = "") {
  return button({ class: "order" }, what, () => ask(what, name, question, forcing));
}

const evictColumn = act((row) => orderButton("evict", row.member,
  `Evict ${row.host ?? row.replica_id}? Its lease ends now, and the others go on without it.`));
const drainColumn = act((row) => ["draining", "leaving", "over"].includes(row.standing) ? "" : orderButton("drain", row.node,
  `Drain ${row.host}? Its round is recalled, the others form a new one, and its agent ends without an error.`, "also if too few stay"));
const killColumn = act((row) => orderButton("kill", row.replica_id, `Kill ${row.replica_id}? The process of its manager ends.`));

function leftCell(row) {
  const left = Math.round(row.until - Date.now() / 1000);
  return left >= 0 ? `${left} of ${row.after} s` : `${-left} s overdue`;
}
const timerColumns = [
  number("rank"), column("host"), number("pid"), column("scope"), state("standing"),
  column("expires", (row) => new Date(row.until * 1000).toLocaleTimeString()), column("left", leftCell),
];

function timersCard(timers, count) {
  if (!count.total) return null;
  const more = count.found > timers.length ? `, the first ${timers.length}` : "";
  return make("section", { class: "card", id: "timers" }, make("h2", {}, `Timers ${size(count)}${more}`), table(timerColumns, timers));
}

function groupCard(title, what, group, counts, { members, facts, columns }) {
  const { missing } = group, rows = group[members], count = counts[members], more = counts.missing.found - missing.length;
  const mood = moodOf(group.state), badge = word(group.state, mood === "good" && !group.healthy ? "" : mood);
  return make("section", { class: "card" },
    make("div", { class: "title" }, make("h2", {}, title), badge, counted(count.states)),
    nextDecision(what, group), fields(facts),
    ...(counts.missing.total ? [make("h3", {}, `missing (${counts.missing.total})`), table(missingColumns, missing)] : []),
    more ? dim(`and ${more} more`) : null,
    make("h3", {}, `members ${size(count)}`), table(columns, rows), pager(rows, count));
}

function roundsCard(group, counts) {
  const limits = group.max_nodes ? ` (${group.min_nodes} to ${group.max_nodes} nodes)` : "";
  const facts = [
    ["seats", `${group.size}${limits}`],
    ["bootstrap", group.size && !group.closed ? `${group.address}:${group.port}` : ""],
    ["closed", group.closed], ["stop", group.stop], ["recalled", group.recalled], ["round before", group.before],
  ];
  const columns = about.acts ? [...nodeColumns, evictColumn, drainColumn] : nodeColumns;
  return groupCard(`Round ${group.number}`, "round", group, counts, { members: "members", facts, columns });
}

function quorumCard(group, counts) {
  const facts = [
    ["replicas", `${group.size} (min_replicas ${group.min_replicas})`],
    ["stop", group.stop], ["step", String(group.max_step)],
    ["decided", group.created ? new Date(group.created * 1000).toLocaleString() : ""],
  ];
  const columns = about.acts ? [...replicaColumns, evictColumn, killColumn] : replicaColumns;
  return groupCard(`Quorum ${group.id}`, "quorum", group, counts, { members: "replicas", facts, columns });
}

// Of a worker's failure the reason has one line; below it is what else its agent knew.
function whyCell(row) {
  const worker = row.worker;
  if (!worker) return row.reason;
  const ended = worker.signal ? `signal ${worker.signal}` : worker.exit_code >= 0 ? `exit code ${worker.exit_code}` : "";
  return make("span", {}, row.reason, ended && !row.reason.includes(ended) ? ` (${ended})` : "",
    worker.traceback ? make("pre", { class: "traceback" }, worker.traceback) : null);
}
const eventColumns = [
  column("time", (row) => row.at ? new Date(row.at * 1000).toLocaleString() : "", "short"),
  column("what", (row) => row.kind === "closed" && /^(finished|stopped)/.test(row.reason) ? word(row.kind, "good") : word(row.kind)),
  column("of", (row) => `${row.group === "quorums" ? "quorum" : "round"} ${row.number}`, "short"),
  column("who"), column("why", whyCell), number("revision"),
];

function pastCard() {
  const events = past.history.events.slice().reverse();
  if (!events.length) return null;
  const more = past.total > events.length ? `, the newest ${events.length} of ${past.total}` : "";
  return make("section", { class: "card" }, make("h2", {}, `What happened${more}`),
    make("p", { class: "next", id: "why" }, latest.why), table(eventColumns, events));
}

function drawJob({ report, counts }) {
  const parts = [];
  if (report.exists) {
    summary.replaceChildren(make("span", { id: "health" }), dim(`revision ${report.revision}`));
    if (about.acts && report.rounds && !report.rounds.closed) {
      summary.append(orderButton("close", "", `Close ${report.job}? The run ends for all of its nodes, each with an error.`));
    }
    if (report.rounds) parts.push(roundsCard(report.rounds, counts.rounds));
    if (report.quorum) parts.push(quorumCard(report.quorum, counts.quorum));
    if (!parts.length) parts.push(note("It has neither a rendezvous nor quorums: only a store, timers or heartbeats."));
    if (counts.unreadable.total) parts.push(make("section", { class: "card" }, make("h2", {}, `unreadable keys ${size(counts.unreadable)}`),
      table([column("key", "key", "mono"), column("problem")], report.unreadable)));
    parts.push(timersCard(report.timers, counts.timers));
  } else {
    summary.replaceChildren();
    parts.push(note(past.total
      ? "etcd has no key of this job but its history: it is over, and what it left has expired or was deleted."
      : "etcd has no key of this job: it never began, or was forgotten. It is shown here as soon as it begins."));
  }
  body.replaceChildren(...[...parts, pastCard()].filter(Boolean));
}

function draw() {
  const link = document.getElementById("link"), lost = document.getElementById("lost");
  const silent = receivedAt && Date.now() - receivedAt > STALE_AFTER;
  const state = silent ? "lost" : source === null || !latest ? "opening" : latest.connected ? "live" : "lost";
  document.body.dataset.link = state;
  link.replaceChildren(word(state));
  // What is old may have been healthy; that does not show that it still is.
  const health = state !== "live" ? "unknown" : latest.report?.healthy ? "healthy" : "needs a look";
  document.getElementById("health")?.replaceChildren(word(health));
  lost.hidden = state !== "lost";
  const since = latest?.at ? ` The state below is of ${new Date(latest.at * 1000).toLocaleTimeString()}.` : "";
  if (silent) lost.textContent = `The page's own server does not answer.${since}`;
  else if (state === "lost") lost.textContent = `ETCD IS LOST: ${visible(latest.error)}.${latest.report ? since : ""}`;
}

function drawPage() {
  if (latest?.report) (job === null ? drawList : drawJob)(latest);
  draw();
}

function open() {
  if (document.hidden) return; // it is opened again when the tab is visible again
  const asked = new URLSearchParams(job === null ? look : { ...look, job });
  const before = source, mine = new EventSource(`api/${job === null ? "jobs" : "job"}?${asked}`);
  source = mine;
  const on = (name, use) => mine.addEventListener(name, (event) => {
    before?.close(); // only now, so that the server's watch goes on
    if (mine !== source) return;
    receivedAt = Date.now();
    use(JSON.parse(event.data));
    drawPage();
  });
  // While etcd is lost, the last report stays; the time is that of the last one that was true.
  on("report", (found) => { latest = { ...found, at: found.connected ? found.at : latest?.at ?? found.at }; });
  on("history", (found) => { past = found; });
  mine.addEventListener("error", () => {
    if (mine !== source) return;
    receivedAt = receivedAt || Date.now();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => { if (mine === source) open(); }, 2000);
  });
}

// A browser has six connections to a server for all of its tabs, and a stream takes one: a hidden tab has none.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    source = null;
    receivedAt = 0;
    latest = null; // what was drawn stays, and is not shown as live
    draw();
  } else if (source === null) {
    open();
  }
});

const above = job === null ? [] : [make("a", { href: "./" }, "jobs"), dim("/")];
if (job !== null) document.title = `${visible(job)} · ftcoord`;
main.append(make("div", { class: "title" }, ...above, make("h1", {}, job ?? "Jobs")), tools, body);
setInterval(draw, 1000);
draw();
open();
fetch("api/about").then((answer) => answer.json()).then((found) => {
  about = found;
  document.getElementById("where").textContent = visible(`${about.endpoints.join(", ")} ${about.key_prefix}`);
  const may = about.acts ? "who has the token may act" : "read-only";
  document.getElementById("about").textContent = `ftcoord ${about.version} on ${about.host}; ${may}`;
  drawPage();
}).catch(() => draw());
