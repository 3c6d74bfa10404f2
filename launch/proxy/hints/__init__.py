"""Hints of clients about the future of prompts: `kv.retain` keeps a prompt in the pool for a while,
`kv.release` ends that, and `kv.prefetch` makes a decode node load it before its request comes.

The master leases each key that it is asked for, and does not evict leased objects. So a pin is a list of
chunks' names: the proxy asks for all of them again and again, before their leases end. Chunks that are not in
the pool yet are kept as soon as they come.

1. Pins never fill the pool. All pins of all proxies together take at most `max_share` of it. They count in
   full, whether the pool has them or not. A chunk that several of a holder's pins contain counts once. If the
   pool shrinks, the newest pins end.
2. A pin ends when its time is over, when a client releases it, at the next request for its prompt (`once`),
   when the weights change, and when this proxy stops. Leases cannot be given back: they end by themselves.
3. An action never fails the completion that it comes with, nor the actions beside it.
4. A pin belongs to its client and its tenant: others can neither release nor replace it.
5. A holder is a tenant, or a client without a tenant. If clients have keys, a holder gets a pin only while it
   has fewer pins than are free. So a single holder takes at most half, two take a third each, and the next
   one still finds room. Chunks are divided by the same rule, unless the tenant has a bound of its own.

`actions` does what hints ask for. `messages` (pure) are hints and their answers. `pins` (pure) says which
chunks are kept until when. `prefetches` has decode nodes load prompts.
"""
