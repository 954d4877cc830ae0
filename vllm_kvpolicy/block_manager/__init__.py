"""The two pools: which superblocks a request holds, and when it gives some back.

Process: any
"""
