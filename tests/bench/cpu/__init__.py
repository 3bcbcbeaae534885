"""`cpu`: compare Penstock with every installed peer on the same work on this machine, in turns.

`work` defines the jobs, `limits` their minimum cost on this machine, `engines` the participants, `process` how to call
one of them, `turns` the order of calls, `compare` and `result` the evaluation.
"""
