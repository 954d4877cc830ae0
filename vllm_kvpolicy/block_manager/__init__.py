"""The engine process: which superblocks a request holds and when it returns some."""
