"""The worker process: runs events before each forward pass and sees what it computes.

A step goes through `worker` (a mixin of vLLM's worker, which the executor calls),
`runtime` (begin, build, observe, end), `compaction` (the step's events) and a tier,
which describes the step to the attention backends. `setup` builds policies, captures
and tables before the KV cache exists, and the runtime over it afterwards.

What the worker keeps of one request, and what becomes of it when the request goes:

==================================  ==========================  ========================
where                               what                        when the request goes
==================================  ==========================  ========================
`request_table.RequestTable`        superblocks of survivors,   row freed at once,
                                    frontier, last event        values overwritten
`tiers.head_tables.HeadTables`      page lists of its heads,    overwritten
                                    in a ragged tier
`tiers.head_tables.FoldedTables`    the same with local pages,  dropped at once, by
                                    until they change           `Tier.forget`
`tiers.page_selection`              whether it selects, and     overwritten
                                    bounds of its pages
`survivors.SurvivorMemory`          values that policies        overwritten
                                    remember of its survivors
`captures.query_windows`            newest queries, in          given back by the
                                    superblocks on loan         scheduler; in FP8
                                                                zeroed at once
`captures.token_signals`            signals by position, and    row freed at once,
                                    its last hidden state       values overwritten
`captures.visible_until`            until when its tokens are   overwritten
                                    visible, by slot; in a
                                    cached superblock they live
                                    as long as it is cached
`observers.trace.Tracer`            true positions, where a     overwritten
                                    trace is asked for
==================================  ==========================  ========================

"At once" is in `begin` of the next step, which is told the requests that have finished,
were aborted or were preempted; to the worker these are all the same. What is
"overwritten" stays until the next owner of the row, window or page empties or fills it
before anything of it is read.
"""
