// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds a small kernel with the tracers that Debian's kernels lack.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::host::run;

/// The options that differ from the minimal kernel.
const FRAGMENT: &str = include_str!("../../kernels/tracers.config");

/// Returns whether a kernel was built with the current options.
pub fn is_current(directory: &Path) -> bool {
    fs::read_to_string(directory.join("fragment")).is_ok_and(|fragment| fragment == FRAGMENT)
}

/// Builds the kernel in `work`, and moves the results to `made`.
pub fn build(name: &str, archive: &Path, work: &Path, made: &Path) -> Result<()> {
    let tree = work.join("tree");
    fs::create_dir(&tree)?;
    run(Command::new("tar").arg("-x").arg("-f").arg(archive).arg("-C").arg(&tree).arg("--strip-components=1"))?;
    fs::remove_file(archive)?;
    let fragment = work.join("fragment");
    fs::write(&fragment, FRAGMENT)?;
    let make =
        |targets: &[&str]| run(without_make_variables(Command::new("make").arg("-s").args(targets).current_dir(&tree)));
    make(&["tinyconfig"])?;
    run(Command::new("scripts/kconfig/merge_config.sh").args(["-m", ".config"]).arg(&fragment).current_dir(&tree))?;
    make(&["olddefconfig"])?;
    let config = fs::read_to_string(tree.join(".config"))?;
    let missing = missing(FRAGMENT, &config);
    if !missing.is_empty() {
        bail!("the kernel's configuration does not take: {}", missing.join(", "));
    }
    let jobs = thread::available_parallelism().map_or(1, |count| count.get());
    eprintln!("{name}: building, which takes a quarter of an hour on two processors");
    // At low priority, so that others on the machine go first.
    let mut build = Command::new("nice");
    run(without_make_variables(
        build.args(["make", "-s", &format!("-j{jobs}"), "bzImage", "modules"]).current_dir(&tree),
    ))?;

    fs::rename(tree.join("arch/x86/boot/bzImage"), made.join("vmlinuz")).context("the build made no bzImage")?;
    fs::write(made.join("config"), config)?;
    fs::rename(fragment, made.join("fragment"))?;
    let modules = made.join("modules");
    fs::create_dir(&modules)?;
    let order = fs::read_to_string(tree.join("modules.order")).context("the build made no modules")?;
    for module in order.lines() {
        let module = tree.join(module).with_extension("ko");
        let name = module.file_name().with_context(|| format!("{} is no module", module.display()))?;
        fs::rename(&module, modules.join(name))?;
    }
    let any = fs::read_dir(&modules)?.next().is_some();
    ensure!(any || !FRAGMENT.contains("=m"), "the build made no modules");
    Ok(())
}

/// Removes the variables of a calling `make`, some of which mean another thing to a kernel: `M` is a module directory.
fn without_make_variables(make: &mut Command) -> &mut Command {
    make.env_remove("MAKEFLAGS").env_remove("MFLAGS").env_remove("MAKELEVEL")
}

/// Returns the lines of the fragment that the configuration does not have.
fn missing<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let is_option = |line: &&str| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_");
    let holds = |wanted: &str| {
        let option = wanted.trim_start_matches("# ").split(['=', ' ']).next().unwrap_or(wanted);
        let said = |line: &str| line.trim_start_matches("# ").split(['=', ' ']).next() == Some(option);
        let mut lines = config.lines().filter(|line| said(line));
        // An option with an unmet dependency is not mentioned, and off.
        lines.next().map_or(wanted.starts_with('#'), |line| line == wanted)
    };
    fragment.lines().filter(is_option).filter(|wanted| !holds(wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_reports_options_that_kconfig_dropped() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\n# CONFIG_D is not set\nCONFIG_NAME=\"x\"\n";
        let fragment = "# about\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=y\n# CONFIG_D is not set\nCONFIG_E=y\n\
                        # CONFIG_F is not set\n# CONFIG_A is not set\nCONFIG_NAME=\"x\"\n";
        assert_eq!(missing(fragment, config), ["CONFIG_B=y", "CONFIG_C=y", "CONFIG_E=y", "# CONFIG_A is not set"]);
    }
}
