#!/usr/bin/env bash
# Everything that a release consists of, with checksums: archive, .deb, .rpm, wheel, SBOM, debug symbols.
#
#   .ci/packaging/build.sh [OUT]        OUT is target/package/out unless given; it must be empty or absent
#
# Needs Rust, gcc, binutils, tar, gzip and python3; for the .deb cargo-deb, for the .rpm cargo-generate-rpm
# (`cargo install cargo-deb cargo-generate-rpm`). A package whose tool is missing is an error, unless TOWLINE_SKIP names it:
# TOWLINE_SKIP="deb rpm".
#
#   TOWLINE_GLIBC   the newest C library that the artefacts may ask for (2.34: RHEL 9, Ubuntu 22.04, Debian 12)
#   TOWLINE_BUILT   a directory with `towline` and `libtowline.so` that are built already, instead of building them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "build.sh: $*" >&2; exit 1; }
step() { printf '== %s\n' "$*"; }
skips() { case " ${TOWLINE_SKIP:-} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

out=${1:-target/package/out}
root=target/package/root
mkdir -p "$out"
[ -z "$(ls -A "$out")" ] || fail "$out is not empty"
out=$(realpath "$out")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$(uname -m)
# All times in the artefacts: that of the last commit, so that two builds give the same archives.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
for tool in cargo readelf strip objcopy tar gzip python3; do
    command -v "$tool" >/dev/null || fail "$tool is missing"
done
skips deb || cargo deb --version >/dev/null 2>&1 || fail "cargo-deb is missing: cargo install cargo-deb, or TOWLINE_SKIP=deb"
skips rpm || command -v cargo-generate-rpm >/dev/null ||
    fail "cargo-generate-rpm is missing: cargo install cargo-generate-rpm, or TOWLINE_SKIP=rpm"

step "towline $version for $machine"
grep -q "^## \[$version\]" CHANGELOG.md || fail "CHANGELOG.md has no section [$version]"
built=${TOWLINE_BUILT:-}
if [ -z "$built" ]; then
    # Paths of the machine that builds do not belong into the library.
    RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$PWD=/towline --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo" \
        cargo build --release --locked --target-dir target/package/build
    built=target/package/build/release
fi

step "the tree"
rm -rf "$root"
doc=$root/share/doc/towline
mkdir -p "$root/bin" "$root/lib/towline" "$doc"
install -m 755 "$built/towline" "$root/bin/towline"
install -m 644 "$built/libtowline.so" "$root/lib/towline/libnccl-net.so"
debug=target/package/towline-$version-$machine-debug
rm -rf "$debug" && mkdir -p "$debug"
for file in bin/towline lib/towline/libnccl-net.so; do
    objcopy --only-keep-debug "$root/$file" "$debug/$(basename "$file").debug"
    strip --strip-unneeded "$root/$file"
    objcopy --add-gnu-debuglink="$debug/$(basename "$file").debug" "$root/$file"
done
ln -s libnccl-net.so "$root/lib/towline/libnccl-net-towline.so"
glibc=$(.ci/packaging/glibc.sh --at-most "${TOWLINE_GLIBC:-2.34}" "$root/bin/towline" "$root/lib/towline/libnccl-net.so")
echo "asks for glibc $glibc"

"$root/bin/towline" generate target/package/generated
mkdir -p "$root/share/man/man1" "$root/share/bash-completion/completions" "$root/share/zsh/vendor-completions" \
    "$root/share/fish/vendor_completions.d"
for page in target/package/generated/man1/*.1; do gzip -9nc "$page" >"$root/share/man/man1/$(basename "$page").gz"; done
install -m 644 target/package/generated/completions/towline.bash "$root/share/bash-completion/completions/towline"
install -m 644 target/package/generated/completions/_towline "$root/share/zsh/vendor-completions/_towline"
install -m 644 target/package/generated/completions/towline.fish "$root/share/fish/vendor_completions.d/towline.fish"

step "documentation, licences and SBOM"
python3 -B .ci/packaging/docs.py "$doc" "$version"
python3 -B .ci/packaging/inventory.py --check --licences "$doc/THIRD-PARTY-LICENCES" --sbom "$out/towline-$version-$machine.cdx.json"

step "archives"
archive() {
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$2" \
        --transform "s,^\.,towline-$version," -cf - . | gzip -n >"$1"
}
archive "$out/towline-$version-linux-$machine.tar.gz" "$root"
archive "$out/towline-$version-linux-$machine-debug.tar.gz" "$debug"
if git rev-parse --git-dir >/dev/null 2>&1; then
    git archive --prefix="towline-$version/" HEAD | gzip -n >"$out/towline-$version-source.tar.gz"
fi

step "wheel"
python3 -B .ci/packaging/wheel.py "$root" "$version" "manylinux_${glibc/./_}_$machine" "$out"

# Both are made of the tree above, by the tables in Cargo.toml; nothing is built again.
if skips deb; then echo "LEFT OUT: .deb"; else step ".deb"; cargo deb --locked --no-build --no-strip --output "$out"; fi
if skips rpm; then echo "LEFT OUT: .rpm"; else step ".rpm"; cargo generate-rpm --output "$out"; fi

step "checksums"
sums=$(cd "$out" && sha256sum -- *)
printf '%s\n' "$sums" | tee "$out/SHA256SUMS"
