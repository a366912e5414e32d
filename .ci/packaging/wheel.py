#!/usr/bin/env python3
"""Makes the wheel `towline-nccl` of the tree that .ci/packaging/build.sh lays.

    .ci/packaging/wheel.py ROOT VERSION PLATFORM OUT

PLATFORM is a wheel's platform tag, as manylinux_2_34_x86_64. The wheel holds the library, the program and a small Python
package that says where the library is; pip puts a command `towline` beside its python. Nothing but Python is needed.
"""

import base64
import hashlib
import os
import sys
import zipfile

NAME = "towline_nccl"
HERE = os.path.dirname(os.path.abspath(__file__))

METADATA = """\
Metadata-Version: 2.4
Name: towline-nccl
Version: {version}
Summary: A network transport for NCCL: TCP and RDMA behind the ncclNet plugin interface
License-Expression: MIT OR Apache-2.0
{licence_files}Project-URL: Repository, https://github.com/towline/towline
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.8
Description-Content-Type: text/markdown

"""

WHEEL = """\
Wheel-Version: 1.0
Generator: towline
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""

ENTRY_POINTS = """\
[console_scripts]
towline = towline_nccl.__main__:main
"""


def read(*path):
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def contents(root, version, platform):
    """What goes into the wheel: (path, bytes, whether it is a program)."""
    for name in ("__init__.py", "__main__.py"):
        yield f"{NAME}/{name}", read(HERE, "python", NAME, name), False
    yield f"{NAME}/bin/towline", read(root, "bin/towline"), True
    # A wheel has no links: the library is there under both names.
    for name in ("libnccl-net.so", "libnccl-net-towline.so"):
        yield f"{NAME}/lib/towline/{name}", read(root, "lib/towline", name), True
    info = f"{NAME}-{version}.dist-info"
    licences = ["LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY-LICENCES"]
    for name in licences:
        yield f"{info}/licenses/{name}", read(root, "share/doc/towline", name), False
    licence_files = "".join(f"License-File: {name}\n" for name in licences)
    head = METADATA.format(version=version, licence_files=licence_files).encode()
    yield f"{info}/METADATA", head + read(HERE, "python", "README.md"), False
    yield f"{info}/WHEEL", WHEEL.format(platform=platform).encode(), False
    yield f"{info}/entry_points.txt", ENTRY_POINTS.encode(), False


def build(root, version, platform, out):
    """Writes the wheel into `out` and returns its path. The same input gives the same bytes."""
    info = f"{NAME}-{version}.dist-info"
    path = os.path.join(out, f"{NAME}-{version}-py3-none-{platform}.whl")
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name, data, is_program=False):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if is_program else 0o100644) << 16
            wheel.writestr(entry, data)

        for name, data, is_program in contents(root, version, platform):
            add(name, data, is_program)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        add(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode())
    return path


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    print(build(*sys.argv[1:]))
