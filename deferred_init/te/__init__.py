"""What the package knows about Transformer Engine.

Nothing here imports Transformer Engine when it is imported itself, except
`fusers.py` and `audit_te.py`, which are loaded once `transformer_engine.pytorch` is.
"""
