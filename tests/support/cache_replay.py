"""A cache that keeps or drops tokens one step at a time: what a query reads from it."""


def replay(keep: list[bool], window: int, page: int) -> list[set[int]]:
    """Return the positions that each query sees, for one KV head.

    The cache holds a dense part, whose pages leave it when none of their tokens is in
    the window any more, and a part of tokens that were kept when they left. With pages
    of one token this is what the authors' ring does.

    Args:
        keep: by position.
        window: tokens in the window, the querying one included.
        page: tokens of a page.
    """
    dense: list[int] = []
    kept: list[int] = []
    seen = []
    for query in range(len(keep)):
        dense.append(query)
        while True:
            oldest = dense[:page]
            if len(oldest) < page or oldest[-1] > query - window:
                break
            dense = dense[page:]
            kept += [token for token in oldest if keep[token]]
        seen.append({*dense, *kept})
    return seen
