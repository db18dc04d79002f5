// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles `src/floor.bpf.c` and generates its skeleton.

use std::env;
use std::error::Error;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

const PROGRAM: &str = "src/floor.bpf.c";
/// Where `kernel_types.h` is.
const HEADERS: &str = "../crates/whylate-sources/bpf";

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for watched in [PROGRAM, HEADERS] {
        println!("cargo:rerun-if-changed={watched}");
    }
    println!("cargo:rerun-if-env-changed=CLANG");
    SkeletonBuilder::new()
        .source(PROGRAM)
        .clang_args(["-I", HEADERS, "-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"])
        .build_and_generate(out.join("floor.skel.rs"))
        .map_err(|error| format!("cannot build {PROGRAM}: {error:#} (is clang installed?)"))?;
    Ok(())
}
