// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests `scripts/check-skips` with made-up output of `cargo test`: a run fails if a test is skipped without a rule.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The kernel of the last landing.
const RELEASE: &str = "6.18.44";

/// Returns output of `cargo test -- --show-output` in which each of these tests printed that text.
fn output(tests: &[(&str, &str)]) -> String {
    let mut text = format!("\nrunning {} tests\n", tests.len());
    tests.iter().for_each(|(name, _)| text += &format!("test {name} ... ok\n"));
    text += "\nsuccesses:\n";
    tests.iter().for_each(|(name, said)| text += &format!("\n---- {name} stdout ----\n{said}\n\n"));
    text += "\nsuccesses:\n";
    tests.iter().for_each(|(name, _)| text += &format!("    {name}\n"));
    text + &format!("\ntest result: ok. {} passed; 0 failed; 0 ignored; 0 measured\n\n", tests.len())
}

/// Runs the script; returns whether it succeeds, and its output.
fn checked(rules: Option<&str>, output: &str, release: &str, root: &str, is_ci: bool) -> Result<(bool, String)> {
    let directory = tempfile::tempdir()?;
    let (log, list) = (directory.path().join("log"), directory.path().join("rules"));
    fs::write(&log, output)?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/check-skips");
    let mut command = Command::new(script);
    command.arg(&log).args([release, root]).env_remove("CI").env_remove("ALLOWED_SKIPS");
    if let Some(rules) = rules {
        fs::write(&list, rules)?;
        command.env("ALLOWED_SKIPS", &list);
    }
    if is_ci {
        command.env("CI", "true");
    }
    let output = command.output().context("cannot run scripts/check-skips")?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(output.status.code().is_some_and(|code| code < 2), "{}: {said}", output.status);
    Ok((output.status.success(), said))
}

#[test]
fn allowed_skips_pass() -> Result<()> {
    let rules = "# why\n\nany | a::test | there is no (tool) *\nlinux-6.18.* | * | this kernel has no null_blk\nno-ci | b | *\n";
    let all = output(&[
        ("a::test", "skipped: there is no (tool) of this *name*"),
        ("b", "figures\nskipped: this kernel has no null_blk\nskipped: anything"),
        ("c", "it passed"),
    ]);
    ensure!(checked(Some(rules), &all, RELEASE, "root", false)? == (true, String::new()));
    // Other kernels, other tests and CI have fewer rules.
    for (release, is_ci, text, expected) in [
        ("6.12.1", false, output(&[("c", "skipped: this kernel has no null_blk")]), "c: this kernel has no null_blk"),
        (RELEASE, true, all, "b: anything"),
        (RELEASE, false, output(&[("a::test2", "skipped: there is no (tool) x")]), "a::test2: there is no (tool) x"),
        (
            RELEASE,
            false,
            output(&[("a::test", "skipped: but there is no (tool) x")]),
            "a::test: but there is no (tool) x",
        ),
        // Without a test, such as a line that a program prints.
        (RELEASE, false, "skipped: anything\n".to_owned(), "?: anything"),
    ] {
        let said = checked(Some(rules), &text, release, "root", is_ci)?;
        ensure!(said == (false, format!("not allowed to be skipped: {expected}\n")), "{said:?}");
    }
    Ok(())
}

#[test]
fn few_inconclusive_comparisons_pass() -> Result<()> {
    let tests: Vec<(String, String)> = (0..4)
        .map(|number| (format!("test_{number}"), "inconclusive: others\ninconclusive: others".to_owned()))
        .collect();
    let of = |count: usize| -> Result<(bool, String)> {
        let tests: Vec<_> = tests[..count].iter().map(|(name, said)| (name.as_str(), said.as_str())).collect();
        checked(Some(""), &output(&tests), RELEASE, "root", true)
    };
    let (is_right, said) = of(3)?;
    ensure!(is_right && said.starts_with("3 inconclusive (at most 3):\n    test_0: others\n"), "{said}");
    let (is_right, said) = of(4)?;
    ensure!(!is_right && said.contains("\ntoo many tests are inconclusive"), "{said}");
    Ok(())
}

/// The committed list: a message of the code under test about the kernel is no valid reason.
#[test]
fn attach_failure_is_no_reason_to_skip() -> Result<()> {
    let refused = output(&[
        ("a", "skipped: tracepoint workqueue:workqueue_queue_wrk is not in this kernel (boot one that has it)"),
        ("b", "skipped: no source measures here"),
        ("c", "skipped: needs root"),
        ("d", "skipped: not permitted (run as root, or grant CAP_BPF and CAP_PERFMON)"),
    ]);
    for (is_ci, root) in [(false, "root"), (true, "root"), (true, "no-root")] {
        let (is_right, said) = checked(None, &refused, RELEASE, root, is_ci)?;
        ensure!(!is_right && said.lines().count() == 4, "{said}");
    }
    // Without root all kernel tests are skipped, except in CI.
    ensure!(checked(None, &refused, RELEASE, "no-root", false)? == (true, String::new()));
    let known = output(&[
        ("disk", "skipped: this kernel has no null_blk"),
        ("trial", "skipped: that is what `make trial` does"),
    ]);
    ensure!(checked(None, &known, RELEASE, "root", true)? == (true, String::new()));
    Ok(())
}

#[test]
fn malformed_rule_is_an_error() -> Result<()> {
    for rules in ["any | a test without a reason\n", "windows | * | *\n"] {
        ensure!(checked(Some(rules), "", RELEASE, "root", false).is_err(), "{rules}");
    }
    Ok(())
}
