// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel that is built: small, with the tracers that Debian's kernels lack.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::host::run;

/// The options that differ from the smallest kernel.
const FRAGMENT: &str = include_str!("../../kernels/tracers.config");

/// Whether a kernel was built with the options of now.
pub fn is_current(folder: &Path) -> bool {
    fs::read_to_string(folder.join("fragment")).is_ok_and(|fragment| fragment == FRAGMENT)
}

/// Builds the kernel in `work` and puts what is used of it in `made`.
pub fn build(name: &str, archive: &Path, work: &Path, made: &Path) -> Result<()> {
    let tree = work.join("tree");
    fs::create_dir(&tree)?;
    run(Command::new("tar").arg("-x").arg("-f").arg(archive).arg("-C").arg(&tree).arg("--strip-components=1"))?;
    fs::remove_file(archive)?;
    let fragment = work.join("fragment");
    fs::write(&fragment, FRAGMENT)?;
    let make = |targets: &[&str]| run(apart(Command::new("make").arg("-s").args(targets).current_dir(&tree)));
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
    // It is a background job: whoever else works on the machine goes first.
    let mut build = Command::new("nice");
    run(apart(build.args(["make", "-s", &format!("-j{jobs}"), "bzImage", "modules"]).current_dir(&tree)))?;

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

/// A `make` that calls us hands its variables down, and some mean another thing to a kernel: `M` is a module folder.
fn apart(make: &mut Command) -> &mut Command {
    make.env_remove("MAKEFLAGS").env_remove("MFLAGS").env_remove("MAKELEVEL")
}

/// The lines of the fragment that do not hold.
fn missing<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let is_option = |line: &&str| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_");
    let holds = |wanted: &str| {
        let option = wanted.trim_start_matches("# ").split(['=', ' ']).next().unwrap_or(wanted);
        let said = |line: &str| line.trim_start_matches("# ").split(['=', ' ']).next() == Some(option);
        let mut lines = config.lines().filter(|line| said(line));
        // What depends on something that is off is not mentioned, and off.
        lines.next().map_or(wanted.starts_with('#'), |line| line == wanted)
    };
    fragment.lines().filter(is_option).filter(|wanted| !holds(wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_the_configuration_does_not_take_is_named() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\n# CONFIG_D is not set\nCONFIG_NAME=\"x\"\n";
        let fragment = "# about\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=y\n# CONFIG_D is not set\nCONFIG_E=y\n\
                        # CONFIG_F is not set\n# CONFIG_A is not set\nCONFIG_NAME=\"x\"\n";
        assert_eq!(missing(fragment, config), ["CONFIG_B=y", "CONFIG_C=y", "CONFIG_E=y", "# CONFIG_A is not set"]);
    }
}
