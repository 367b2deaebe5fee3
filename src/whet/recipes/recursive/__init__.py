"""What tiny recursive models share, those of `whet train puzzle` and the causal ones of `whet train chat`.

initial     the first weights: a truncated normal that has the deviation it says
layers      norm, feed-forward and attention, each without a bias
recursion   two states, refined in turn by one network
"""
