"""Tuning: which plans a kernel can be built with, the search for the best one, and where results are kept.

    workload    what is tuned: an operator with its shapes and formats
    spaces      the plans that are worth trying for a workload on an arch
    search      MetaSchedule's evolutionary search over them
    features    what the cost model sees of a plan
    database    measurements and winners, and how a compile finds them

Nothing here builds or measures a kernel: that is handed in.
"""
