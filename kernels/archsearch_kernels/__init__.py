"""Triton kernels of a layer whose heads are of two kinds, with an fp32 reference in plain torch beside each.

gdn: the gated delta rule of chosen heads. prologue: norm and rotation of q and k before both operators. fusion: norm, gate and
order of the heads' outputs behind them. mixed: all of it with full attention, in one call. README.md, "Kernels", shows calls.
"""
