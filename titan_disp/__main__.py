"""``titan-disp …`` and ``python -m titan_disp …`` run this module.

The loss needs only PyTorch, but the command line needs all packages that titan-disp
requires. This module needs none of these packages, so that it can name a missing one
and print the version of titan-disp.
"""

import re
import sys
from importlib.metadata import requires

import titan_disp
from titan_disp.errors import EXIT_CODE


def required_packages() -> set[str]:
    """Return the import names of the packages that titan-disp requires. Packages that
    only extras require are left out.
    """
    lines = [line for line in requires("titan-disp") or [] if "extra ==" not in line]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"titan-disp {titan_disp.__version__}")
        return
    try:
        from titan_disp import cli

        cli.main()
    except ModuleNotFoundError as error:
        if error.name == "triton":  # torchtitan imports triton
            what = "'.[cpu]'"
        elif error.name in required_packages():
            what = "."
        else:
            raise
        print(
            f"titan-disp: error: titan-disp needs {error.name}, which is not installed: "
            f"pip install {what} in a clone of titan-disp",
            file=sys.stderr,
        )
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:  # Importing torch takes seconds
        print("titan-disp: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as in shells


if __name__ == "__main__":
    main()
