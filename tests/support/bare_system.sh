# Bare systems made with debootstrap, for the scripts that source this. Each suite is made once and kept as an archive.
#
#   TOWLINE_BARE_DIR     where they are kept (target/bare)
#   TOWLINE_BARE_MIRROR  Debian's mirror (debootstrap's own choice)
bare=${TOWLINE_BARE_DIR:-$project/target/bare}
mkdir -p "$bare"
root=

# Sets `root` to the directory of a new system of suite $1. The caller removes it.
unpack_bare() {
    local suite=$1 script=
    if ! [ -e "$bare/$suite.tar" ]; then
        echo "== $suite: making a bare system (after $SECONDS s)"
        # A suite that is newer than this debootstrap is made as unstable is.
        [ -e "/usr/share/debootstrap/scripts/$suite" ] || script=sid
        root=$(mktemp -d "$bare/$suite.XXXXXX")
        debootstrap --variant=minbase "$suite" "$root" "${TOWLINE_BARE_MIRROR:-}" $script >"$bare/$suite.log" 2>&1 ||
            fail "debootstrap of $suite failed: $bare/$suite.log"
        tar -C "$root" -cf "$bare/$suite.tar.part" .
        mv "$bare/$suite.tar.part" "$bare/$suite.tar"
        rm -rf --one-file-system "$root"
    fi
    root=$(mktemp -d "$bare/$suite.XXXXXX")
    tar -C "$root" -xf "$bare/$suite.tar"
    chmod 755 "$root" # as the root directory of a system is
}
