"""How fast jobq is, beside what PostgreSQL itself can do: ``python -m bench NAME``.

Every figure stands beside a yardstick that was measured in the same run, its runs interleaved
with ours: a machine is fast or slow, busy or idle, but it is so for both. So trust ratios first,
CPU time second, and absolute figures last.

What a run is made of:

- `bench.lab` starts a server of its own, with fsync and synchronous_commit on and its data on a
  disk, and pins it to the same cores as everything that is measured;
- `bench.hands` are the processes that are measured: a worker, a yardstick's loop, a client;
- `bench.meter` reads what the server spent: CPU of all its processes, WAL, buffer hits;
- one module a bench, each a function from a lab to its results; `bench.registry` lists them;
- `bench.result` is what all of them return, and `bench.report` prints it.
"""
