"""The program `mlc-amd`. Whoever presses Ctrl-C while the command line is imported gets no traceback either."""

from mlc_amd.tools import interrupts


def main() -> int:
    interrupts.install()
    from mlc_amd.tools import cli  # takes longer than all before it

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
