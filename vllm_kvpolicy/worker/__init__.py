"""The worker process: runs events before each forward pass and sees what it computes.

A step goes through `base` (vLLM's worker calls it), `runtime` (begin, build, observe,
end), `compaction` (the step's events) and a tier, which describes the step to the
attention backends. `setup` builds all of them: sizes before the KV cache exists, the
runtime after.

What the worker keeps of one request, all of it dropped or emptied when the request
ends, is preempted, or its row goes to another:

==================================  ====================================================
`request_table.RequestTable`        its row; superblocks of survivors, frontier and last
                                    event
`tiers.head_tables.HeadTables`      page lists of its heads, in a ragged tier
`tiers.ragged_step.FoldedTables`    the same with local pages, until they change
`tiers.page_selection`              whether it selects, and bounds of its pages
`survivors.SurvivorMemory`          values that policies remember of its survivors
`captures.query_windows`            newest queries, in a window that the scheduler chose
`captures.token_signals`            signals by position, and its last hidden state
`captures.visible_until`            until when its tokens are visible, by slot
==================================  ====================================================

A trace, where one is asked for, follows true positions besides.
"""
