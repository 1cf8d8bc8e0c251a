"""Measurements of ftcoord beside torch's own rendezvous backends; `python -m benchmarks.rendezvous --help`."""
