//! Sets `loom`: the originals' own tests are for the original locks, and are left out.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rustc-cfg=loom");
}
