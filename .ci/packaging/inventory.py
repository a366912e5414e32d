#!/usr/bin/env python3
"""What the library and the program are built from, as Cargo resolves it.

    .ci/packaging/inventory.py --check          licences against deny.toml, and Rust versions against rust-version
    .ci/packaging/inventory.py --sbom FILE      a CycloneDX 1.5 document
    .ci/packaging/inventory.py --licences FILE  the licence texts of all crates in the product

--check looks at every crate, those of tests, models, fuzz targets and build scripts too. The SBOM and the licence texts hold the crates that are
linked into the product. Nothing but Python's standard library and cargo is needed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid

PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Each with a lock file of its own.
MANIFESTS = ["Cargo.toml", "tests/fuzz/Cargo.toml", "tests/models/Cargo.toml"]
LICENCE_FILE = re.compile(r"^(licen[sc]e|copying|copyright|notice|unlicense)", re.IGNORECASE)


def metadata(target, manifest=MANIFESTS[0]):
    """What Cargo says of all crates for one target, all features on."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--all-features", "--filter-platform", target,
               "--manifest-path", manifest]
    return json.loads(subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE).stdout)


def host_target():
    """The target that rustc builds for by default."""
    said = subprocess.run(["rustc", "-vV"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.search(r"^host: (.*)$", said, re.MULTILINE).group(1)


def linked(data):
    """The packages that are part of the product: reached by normal dependencies, procedural macros left out."""
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    is_macro = lambda package: any("proc-macro" in target["kind"] for target in package["targets"])
    found, waiting = set(), [data["resolve"]["root"]]
    while waiting:
        this = waiting.pop()
        if this in found or is_macro(packages[this]):
            continue
        found.add(this)
        for dependency in nodes[this]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    return sorted((packages[this] for this in found), key=lambda package: (package["name"], package["version"]))


def allowed(expression, allow):
    """Whether an SPDX expression can be met with the licences in `allow`. "A/B" is the old form of "A OR B"."""
    tokens = re.findall(r"\(|\)|[^\s()/]+|/", expression or "")

    def either(at):
        fits, at = both(at)
        while at < len(tokens) and tokens[at] in ("OR", "/"):
            other, at = both(at + 1)
            fits = fits or other
        return fits, at

    def both(at):
        fits, at = one(at)
        while at < len(tokens) and tokens[at] == "AND":
            other, at = one(at + 1)
            fits = fits and other
        return fits, at

    def one(at):
        if at >= len(tokens):
            raise ValueError
        if tokens[at] == "(":
            fits, at = either(at + 1)
            if at >= len(tokens) or tokens[at] != ")":
                raise ValueError
            return fits, at + 1
        name, at = tokens[at], at + 1
        if at < len(tokens) and tokens[at] == "WITH":
            name, at = f"{name} WITH {tokens[at + 1]}", at + 2
        return name in allow, at

    try:
        fits, end = either(0)
        return fits and end == len(tokens)
    except (ValueError, IndexError):
        return False


def version(text):
    """A version as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def complaints(packages, allow, rust_version):
    """One line for each crate that breaks a rule."""
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if not allowed(package["license"], allow):
            yield f"{name}: the licence {package['license']!r} is not among those that deny.toml allows"
        if package["rust_version"] and version(package["rust_version"]) > version(rust_version):
            yield f"{name}: needs Rust {package['rust_version']}, and Cargo.toml promises {rust_version}"


def project_file(name):
    """The text of a file of the project."""
    with open(os.path.join(PROJECT, name), encoding="utf-8") as file:
        return file.read()


def listed(text, key):
    """The strings in a TOML array on one line. (Python has a reader of TOML only from 3.11 on.)"""
    return json.loads(re.search(rf"^{key} = (\[.*\])$", text, re.MULTILINE).group(1))


def check():
    """Fails with one line for each crate that breaks a rule."""
    rules = project_file("deny.toml")
    rust_version = re.search(r'^rust-version = "(.*)"$', project_file("Cargo.toml"), re.MULTILINE).group(1)
    packages = {}
    for target in listed(rules, "targets"):
        for manifest in MANIFESTS:
            packages.update((package["id"], package) for package in metadata(target, manifest)["packages"])
    found = list(complaints(packages.values(), listed(rules, "allow"), rust_version))
    for line in found:
        print(f"inventory.py: {line}", file=sys.stderr)
    if not found:
        print(f"{len(packages)} crates: licences allowed, Rust {rust_version} suffices")
    return 1 if found else 0


def sbom(data):
    """A CycloneDX document of the product. The same sources give the same document."""
    checksums = {}
    for package in project_file("Cargo.lock").split("[[package]]")[1:]:
        field = dict(re.findall(r'^(name|version|checksum) = "(.*)"$', package, re.MULTILINE))
        checksums[field["name"], field["version"]] = field.get("checksum")
    packages = linked(data)
    inside = {package["id"] for package in packages}
    purl = lambda package: f"pkg:cargo/{package['name']}@{package['version']}"

    def component(package, kind):
        entry = {"type": kind, "bom-ref": purl(package), "name": package["name"], "version": package["version"], "purl": purl(package)}
        if package["license"]:
            entry["licenses"] = [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
        checksum = checksums.get((package["name"], package["version"]))
        if checksum:
            entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return entry

    names = {package["id"]: purl(package) for package in packages}
    root = next(package for package in packages if package["id"] == data["resolve"]["root"])
    depends = [
        {"ref": names[node["id"]], "dependsOn": sorted(names[other["pkg"]] for other in node["deps"] if other["pkg"] in inside)}
        for node in data["resolve"]["nodes"]
        if node["id"] in inside
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(root, "library")},
        "components": [component(package, "library") for package in packages if package is not root],
        "dependencies": sorted(depends, key=lambda entry: entry["ref"]),
    }
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
    document["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    return json.dumps(document, indent=1) + "\n"


def licences(data):
    """The licence texts of the crates in the product, each text once."""
    texts, without = {}, []
    for package in linked(data):
        if package["id"] == data["resolve"]["root"]:
            continue
        name = f"{package['name']} {package['version']} ({package['license']})"
        folder = os.path.dirname(package["manifest_path"])
        files = sorted(entry for entry in os.listdir(folder) if LICENCE_FILE.match(entry))
        files = [os.path.join(folder, entry) for entry in files if os.path.isfile(os.path.join(folder, entry))]
        for path in files:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = "\n".join(line.rstrip() for line in file.read().strip().splitlines())
            texts.setdefault(text, []).append(name)
        if not files:
            without.append(name)
    out = ["Towline is built from the following crates, under their own licences.\n"]
    for text, names in sorted(texts.items(), key=lambda item: item[1]):
        out.append("\n".join(["=" * 80, *sorted(set(names)), "-" * 80, text, ""]))
    if without:
        out.append("\n".join(["=" * 80, "Crates that carry no text of their licence:", *without, ""]))
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sbom", metavar="FILE")
    parser.add_argument("--licences", metavar="FILE")
    parser.add_argument("--target", default=None, help="the target that is built for (this machine's)")
    options = parser.parse_args()
    if not (options.check or options.sbom or options.licences):
        parser.error("nothing to do: --check, --sbom or --licences")
    status = check() if options.check else 0
    if options.sbom or options.licences:
        data = metadata(options.target or host_target())
        for path, make in ((options.sbom, sbom), (options.licences, licences)):
            if path:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(make(data))
    return status


if __name__ == "__main__":
    sys.exit(main())
