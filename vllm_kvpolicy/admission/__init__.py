"""Which tokens stay once they leave the window: gates, their files, what they show.

Process: any
"""
