"""`cpu`: ours and every peer that is installed, on the same work on this machine, in turns.

`work` says what is asked, `limits` what it must cost at least on this machine, `engines` who takes part, `process`
how one of them is asked, `turns` who is asked when, `compare` and `result` what follows.
"""
