// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles every `*.bpf.c` below `src` and generates its skeleton in a directory of the same name.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // BTF has the paths of sources: the program shall be the same wherever it is built.
    let prefix_map = format!("-ffile-prefix-map={}=/whylate/crates/whylate-sources", env::var("CARGO_MANIFEST_DIR")?);
    // Directories are watched too, so that a new file is found.
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-env-changed=CLANG");
    for program in bpf_programs(Path::new("src"))? {
        let name = program.file_name().and_then(|n| n.to_str()).ok_or("a BPF source has no readable name")?;
        let directory = out.join(program.parent().and_then(Path::file_name).ok_or("a BPF source is in no directory")?);
        fs::create_dir_all(&directory)?;
        let skeleton = directory.join(name.replace(".bpf.c", ".skel.rs"));
        SkeletonBuilder::new()
            .source(&program)
            // v3 has the atomic compare-and-exchange and fetch instructions (kernel 5.12).
            .clang_args(["-I", "bpf", "-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", &prefix_map])
            .build_and_generate(&skeleton)
            .map_err(|error| format!("cannot build {}: {error:#} (is clang installed?)", program.display()))?;
    }
    Ok(())
}

fn bpf_programs(directory: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.append(&mut bpf_programs(&path)?);
        } else if path.to_str().is_some_and(|name| name.ends_with(".bpf.c")) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
