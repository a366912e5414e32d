#!/usr/bin/env python3
"""The documentation that packages carry, with links that work where it lies.

    .ci/packaging/docs.py OUT VERSION

Lays README.md, CHANGELOG.md, the licences and what users read of docs/ into OUT, as they lie in the repository. A link to
what is not there becomes one to the repository, at the release's tag.
"""

import glob
import os
import re
import shutil
import sys

PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CARRIED = ["README.md", "CHANGELOG.md", "LICENSE-*", "docs/*.*", "docs/examples/*", "docs/grafana/*"]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#]+)")


def repository():
    """The address of the repository, as Cargo.toml has it."""
    with open(os.path.join(PROJECT, "Cargo.toml"), encoding="utf-8") as file:
        return re.search(r'^repository = "(.*)"$', file.read(), re.MULTILINE).group(1)


def lay(out, version):
    """Copies the files and mends their links."""
    names = sorted(os.path.relpath(path, PROJECT) for pattern in CARRIED for path in glob.glob(os.path.join(PROJECT, pattern)))
    there = {*names, *(os.path.dirname(name) for name in names)}
    base = f"{repository()}/blob/v{version}"
    for name in names:
        source, target = os.path.join(PROJECT, name), os.path.join(out, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not name.endswith(".md"):
            shutil.copyfile(source, target)
            continue

        def mended(link):
            path = os.path.normpath(os.path.join(os.path.dirname(name), link[1]))
            return link[1] if path in there else f"{base}/{path}"

        with open(source, encoding="utf-8") as file:
            text = file.read()
        with open(target, "w", encoding="utf-8") as file:
            file.write(LINK.sub(mended, text))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lay(*sys.argv[1:])
