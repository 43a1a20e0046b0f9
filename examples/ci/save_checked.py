"""Save a draft only where it passes: for export scripts of SpecForge, of speculators, and of anything else with `save_pretrained`.

In a training script, in the place of `model.save_pretrained(directory)`, on the rank that saves:

    from save_checked import save_checked

    save_checked(model, directory, target="path/of/the/target", engines=["sglang"])

After a script that cannot be changed, on what it wrote:

    python examples/ci/save_checked.py outputs/epoch_9 --target path/of/the/target --engine sglang
"""

import argparse
import os
import shutil
import sys

from pytest_specdecode import DraftError, RejectedDraftError, gate


def save_checked(model, directory, *, target=None, engines=None, serve=None, **arguments):
    """`model.save_pretrained(directory, **arguments)` where the checks pass; else it lies in `<directory>.rejected`, and this raises.

    So whoever uploads or serves `directory` finds a whole draft that passed, or none. The report is returned.
    """
    directory = os.path.abspath(directory)
    unchecked, rejected = f"{directory}.unchecked", f"{directory}.rejected"
    for place in (unchecked, rejected):
        shutil.rmtree(place, ignore_errors=True)
    model.save_pretrained(unchecked, **arguments)
    try:
        report = gate(unchecked, target, engines, serve=serve)
    except RejectedDraftError as error:
        os.rename(unchecked, rejected)
        error.report.write(os.path.join(rejected, "specdecode-report.json"))
        raise
    shutil.rmtree(directory, ignore_errors=True)
    os.rename(unchecked, directory)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", help="what the export script wrote")
    parser.add_argument("--target", help="directory of the target")
    parser.add_argument("--engine", action="append", help="judge for this engine; may be given several times")
    options = parser.parse_args()
    try:
        report = gate(options.directory, options.target, options.engine)
    except DraftError as error:
        sys.exit(str(error))
    print(report)


if __name__ == "__main__":
    main()
