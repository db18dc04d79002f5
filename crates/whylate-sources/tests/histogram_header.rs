// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the BPF histogram header, compiled by the host's compiler, with the `histogram` crate.

use std::io::Write;
use std::process::{Command, Stdio};

const PROGRAM: &str = r#"
#include <stdio.h>
#include "histogram.bpf.h"
int main(void)
{
    unsigned long long value;
    while (fread(&value, sizeof value, 1, stdin) == 1) {
        unsigned int bucket = histogram_bucket(value);
        fwrite(&bucket, sizeof bucket, 1, stdout);
    }
    return 0;
}
"#;

/// xorshift64*: a reproducible generator in which all bits are equally random.
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D)
}

/// A million values, log-uniform from 0 to 2^63, and the edges of every power of two.
fn values() -> Vec<u64> {
    let mut state = 0x5EED_u64;
    let mut values: Vec<u64> = (0..1_000_000)
        .map(|_| {
            let bits = next(&mut state) % 64;
            next(&mut state) >> 1 >> bits
        })
        .collect();
    for power in 0..64 {
        values.extend([1u64 << power, (1u64 << power) - 1, (1u64 << power) + 1]);
    }
    values.extend([1 << 63, u64::MAX]);
    values
}

#[test]
fn bpf_buckets_match_histogram_crate() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let program = directory.path().join("buckets");
    let source = directory.path().join("buckets.c");
    std::fs::write(&source, PROGRAM).expect("the program is written");
    let status = Command::new("cc")
        .args(["-O1", "-I", concat!(env!("CARGO_MANIFEST_DIR"), "/bpf"), "-o"])
        .args([&program, &source])
        .status()
        .expect("cc runs");
    assert!(status.success());

    let values = values();
    let mut child =
        Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    let mut input = child.stdin.take().expect("its standard input is a pipe");
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let writer = std::thread::spawn(move || input.write_all(&bytes));
    let output = child.wait_with_output().expect("the program ends");
    writer.join().expect("the writer ends").expect("all values are written");
    let buckets: Vec<usize> = output
        .stdout
        .chunks_exact(4)
        .map(|bytes| u32::from_ne_bytes(bytes.try_into().expect("four bytes")) as usize)
        .collect();
    assert_eq!(buckets.len(), values.len());

    let mut mismatches = 0;
    let mut crate_histogram = histogram::Histogram::new(3, 64).expect("a valid layout");
    for (value, bucket) in values.iter().zip(&buckets) {
        crate_histogram.increment(*value).expect("every value has a bucket");
        if crate_histogram.as_slice()[*bucket] != 1 {
            mismatches += 1;
            crate_histogram.reset();
        } else {
            crate_histogram.as_mut_slice()[*bucket] = 0;
        }
    }
    println!("{} values, {mismatches} mismatches", values.len());
    assert_eq!(mismatches, 0);
}
