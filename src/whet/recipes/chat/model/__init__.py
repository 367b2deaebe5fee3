"""The two causal models that can be trained on conversations.

looking   who looks at whom: each place at its own document's earlier places
causal    what both models share: tables of tokens in and out
trm       the tiny recursive model as a language model
gpt       a plain transformer to compare it with, of equal parameters or equal compute
open      the model that a config stands for
"""
