// SPDX-License-Identifier: MIT OR Apache-2.0
//! Code in the static program that is in no crate's own language: C libraries, runtimes, and a script.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::Component;
use super::crates::{Metadata, output_of};

/// Returns the libraries and runtimes of C and Rust, and the script in flame graphs.
pub fn linked(cc: &str, metadata: &Metadata) -> Result<Vec<Component>> {
    let (libbpf_sys, sources) = metadata.source("libbpf-sys")?;
    let (zstd_sys, _) = metadata.source("zstd-sys")?;
    let (inferno, _) = metadata.source("inferno")?;
    let libbpf = after(libbpf_sys, "+v").context("the version of libbpf-sys does not name libbpf's")?;
    let zstd = after(zstd_sys, "+zstd.").context("the version of zstd-sys does not name zstd's")?;
    let elfutils = found(&sources.join("elfutils/configure.ac"), "AC_INIT([elfutils],[", "]")?;
    let zlib = found(&sources.join("zlib/zlib.h"), "#define ZLIB_VERSION \"", "\"")?;
    let gcc = output_of(Command::new(cc).arg("-dumpfullversion"))?.trim().to_owned();
    let rust = output_of(Command::new("rustc").arg("--version"))?;
    let rust = rust.split(' ').nth(1).context("rustc states no version")?;
    let of = |name: &str, version: &str, url: &str, offered: &str, license: &str, notices: &[&str]| Component {
        name: name.to_owned(),
        version: version.to_owned(),
        url: format!("{url}@{version}"),
        offered: offered.to_owned(),
        license: license.to_owned(),
        notices: notices.iter().map(|&notice| notice.to_owned()).collect(),
        sha256: None,
        remark: None,
    };
    let with = |component: Component, remark: &str| Component { remark: Some(remark.to_owned()), ..component };
    Ok(vec![
        of(
            "libbpf",
            libbpf,
            "pkg:github/libbpf/libbpf",
            "LGPL-2.1-only OR BSD-2-Clause",
            "BSD-2-Clause",
            &[
                "Copyright (C) 2013-2015 Alexei Starovoitov",
                "Copyright (C) 2015 Wang Nan, Huawei Inc.",
                "Copyright (c) 2018 Facebook",
            ],
        ),
        with(
            of(
                "elfutils",
                &elfutils,
                "pkg:generic/elfutils",
                "GPL-2.0-or-later OR LGPL-3.0-or-later",
                "LGPL-3.0-or-later",
                &["Copyright (C) 1998-2016 Red Hat, Inc.", "Copyright (C) 2021, 2022 Mark J. Wielaard"],
            ),
            "libelf, linked statically. Its unchanged sources are in the crate libbpf-sys; with them and whylate's own \
             sources, `make static` links the program anew.",
        ),
        of("zlib", &zlib, "pkg:generic/zlib", "Zlib", "Zlib", &["(C) 1995-2022 Jean-loup Gailly and Mark Adler"]),
        of(
            "zstd",
            zstd,
            "pkg:github/facebook/zstd",
            "BSD-3-Clause OR GPL-2.0-only",
            "BSD-3-Clause",
            &["Copyright (c) Meta Platforms, Inc. and affiliates"],
        ),
        with(
            of(
                "glibc",
                &glibc(cc)?,
                "pkg:generic/glibc",
                "LGPL-2.1-or-later",
                "LGPL-2.1-or-later",
                &["Copyright (C) 1991-2022 Free Software Foundation, Inc."],
            ),
            "Linked statically, as the build machine's distribution has it, with its patches. `make static` links the \
             program with another one.",
        ),
        of(
            "libgcc",
            &gcc,
            "pkg:generic/gcc",
            "GPL-3.0-or-later WITH GCC-exception-3.1",
            "GPL-3.0-or-later WITH GCC-exception-3.1",
            &["Copyright (C) 1989-2022 Free Software Foundation, Inc."],
        ),
        of(
            "rust-std",
            rust,
            "pkg:github/rust-lang/rust",
            "MIT OR Apache-2.0",
            "MIT",
            &["Copyright (c) The Rust Project Contributors"],
        ),
        with(
            of(
                "flamegraph.js",
                inferno,
                "pkg:cargo/inferno",
                "CDDL-1.0",
                "CDDL-1.0",
                &["Copyright 2016 Netflix, Inc.", "Copyright 2011 Joyent, Inc.", "Copyright 2011 Brendan Gregg"],
            ),
            "The script in flame graphs that whylate writes. Its source is in the crate inferno.",
        ),
    ])
}

/// Returns the version of the C library that a compiler links.
fn glibc(cc: &str) -> Result<String> {
    let mut child = Command::new(cc)
        .args(["-E", "-P", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {cc}"))?;
    child.stdin.take().context("no pipe")?.write_all(b"#include <features.h>\n__GLIBC__.__GLIBC_MINOR__\n")?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{cc} cannot read features.h");
    let text = String::from_utf8(output.stdout)?;
    let version: String = text.lines().last().unwrap_or_default().split_whitespace().collect();
    ensure!(version.starts_with("2."), "{cc} has an unexpected C library: {version}");
    Ok(version)
}

fn after<'a>(version: &'a str, mark: &str) -> Option<&'a str> {
    version.split_once(mark).map(|(_, after)| after)
}

/// Returns the text between two marks in a file.
fn found(path: &Path, before: &str, behind: &str) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let version = after(&text, before).and_then(|rest| rest.split_once(behind)).map(|(version, _)| version.to_owned());
    version.with_context(|| format!("{} has no {before:?}", path.display()))
}
