"""The program `mlc-amd`. Ctrl-C causes no traceback, even while the command line is being imported."""

from mlc_amd.tools import interrupts


def main() -> int:
    interrupts.install()
    from mlc_amd.tools import cli  # takes longer than everything before it

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
