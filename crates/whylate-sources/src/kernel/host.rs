// SPDX-License-Identifier: MIT OR Apache-2.0
//! The name of this machine, as recordings and reports have it.

use std::env;
use std::ffi::OsString;

/// Environment variable with the name of the machine. In a pod, the kernel only knows the name of the pod.
const VARIABLE: &str = "WHYLATE_HOST";

/// Returns the name in `WHYLATE_HOST`, or else the host name of the kernel.
pub fn name() -> String {
    named(env::var_os(VARIABLE))
}

fn named(given: Option<OsString>) -> String {
    let given = given.filter(|name| !name.is_empty()).map(|name| name.to_string_lossy().into_owned());
    given.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::named;

    #[test]
    fn given_name_replaces_that_of_the_kernel() {
        let of_kernel = fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
        assert_eq!(named(None), of_kernel.trim_end());
        assert_eq!(named(Some("".into())), of_kernel.trim_end());
        assert_eq!(named(Some("node-7".into())), "node-7");
    }
}
