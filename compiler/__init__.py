import mlc_amd.schedules  # noqa: F401 (before TVM)
