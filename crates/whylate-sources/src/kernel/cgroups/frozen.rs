// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frozen cgroups: by `freezer.state` of v1, or `cgroup.freeze` of v2.

use std::fs;
use std::path::Path;

use super::{mounted_of_v1, path_in_hierarchy, unified_root};
use crate::kernel::proc;

const FREEZER: &str = "freezer";

/// Tests whether the cgroup of a process, or an ancestor of it, is frozen.
pub(crate) fn is_frozen(process: u32) -> bool {
    let Ok(own) = proc::text(format!("/proc/{process}/cgroup")) else { return false };
    let has = |root: &Path, controller, file, said: &str| {
        let Some(path) = own.lines().find_map(|line| path_in_hierarchy(line, controller)) else { return false };
        let file = root.join(path.trim_start_matches('/')).join(file);
        fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line == said))
    };
    mounted_of_v1(FREEZER).is_some_and(|root| has(&root, Some(FREEZER), "freezer.state", "FROZEN"))
        || unified_root().is_some_and(|root| has(&root, None, "cgroup.events", "frozen 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_process_is_not_frozen() {
        assert!(!is_frozen(std::process::id()));
        assert!(!is_frozen(u32::MAX));
    }
}
