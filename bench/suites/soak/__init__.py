"""`pd-cache bench soak`: a cluster of real processes under random operations and random faults, watched by an oracle.

It answers one question: whatever happens to the cache, does it ever change a byte, keep a caller waiting, raise, or leave something
behind? A run goes like this:

1. `isolate` starts the run in namespaces of its own, so that the kernel removes everything when the run ends, however it ends.
2. `plan` draws operations, requests and faults from the seed. `kinds` is the table of faults that can be drawn.
3. `cluster` writes the YAML files and runs the nodes on `hosts`; `driver` is the process that drives a cache engine.
4. `oracle` derives every byte of KV from the tokens, and compares the whole paged buffer after each operation.
5. `faults` does what the plan says, and undoes it. `clients` sends requests through the proxy; `strangers` misbehave.
6. `judge` decides which answers were late, `leaks` what was left over, `verdict` what the report says.

`conduct` ties them together.
"""
