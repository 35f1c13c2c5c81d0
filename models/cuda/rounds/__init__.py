"""The kernels that let one verification follow another with no host between.

A verification graph is wrapped in two of them. *gate*, at its head, waits for the draft's
just-in-time chain where a row's last outcome was a miss. *settle*, at its end, judges the chain by
the target's own choices (shared noise, greedy), looks the outcome up in the speculation cache,
waits (bounded) for as much of the cached chain as pays, writes the next step's input, and posts a
record for scheduler and draft (``ipc.round_records``). *keys* and *depth* (``publish``) are the
draft's: they write the branches of a round and, pass by pass, their tokens.

The cache lies in memory of the *target's* GPU and the draft writes to it over the link: whoever
waits polls its own memory, and a draft that dies takes nothing away that a kernel still reads. Its
words are in ``layout``. A lookup compares number, hash and outcome, range-checks the tokens, and
looks at the number again at the end, so that a stale or torn row can only cost speed.

Every wait ends at its deadline, at the abort word, or (for branches) when the draft says that it
has none; the record's flags say which.
"""
