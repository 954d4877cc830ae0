"""Soaks a server in random traffic and faults until a promise breaks or time is up.

`python -m benchmarks.soak` starts a server that allows several policies and a stock
server beside it. `asks` draws requests by a seed, `fuzz` draws malformed ones, `storm`
sends them in waves. After each wave comes a quiet moment, in which `watch` and `probes`
look at both servers. `faults` breaks further servers. What has to hold is in
`promises`; docs/reliability.md explains it.
"""
