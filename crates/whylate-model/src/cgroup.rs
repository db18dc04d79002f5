// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cgroup and container of a thread.

use serde::{Deserialize, Serialize};

/// Number of hexadecimal digits of a container ID, after which container runtimes name the cgroup.
const ID_DIGITS: usize = 64;

/// A cgroup as shown with late events and in rankings.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Cgroup {
    /// Path within its hierarchy, such as `/system.slice/cron.service`.
    #[serde(rename = "cgroup")]
    pub path: String,
    /// ID of the container that it is or belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

impl Cgroup {
    /// Returns the cgroup with this path.
    pub fn new(path: &str) -> Self {
        Cgroup { path: path.to_owned(), container: container(path).map(str::to_owned) }
    }
}

/// Returns the innermost container of a path: `/docker/ID`, `/…/cri-containerd-ID.scope`, `/kubepods/…/podUID/ID/…`.
fn container(path: &str) -> Option<&str> {
    let is_id = |word: &&str| word.len() == ID_DIGITS && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    path.rsplit(|letter: char| !letter.is_ascii_alphanumeric()).find(is_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_container_in_paths_of_all_runtimes() {
        let id = "0123456789abcdef".repeat(4);
        let other = "f".repeat(ID_DIGITS);
        for path in [
            format!("/docker/{id}"),
            format!("/system.slice/docker-{id}.scope"),
            format!("/kubepods.slice/kubepods-pod1f_2.slice/cri-containerd-{id}.scope"),
            format!("/kubepods/besteffort/pod8d7-1/{id}"),
            format!("/machine.slice/libpod-{id}.scope/container"),
            format!("/kubelet/docker/{other}/kubepods/{id}/init.scope"),
        ] {
            assert_eq!(Cgroup::new(&path), Cgroup { path: path.clone(), container: Some(id.clone()) });
        }
        for path in ["/", "/user.slice/user-0.slice", &format!("/docker/{id}0"), &format!("/docker/x{}", &id[1..])] {
            assert_eq!(Cgroup::new(path).container, None, "{path}");
        }
    }

    #[test]
    fn json_has_one_or_two_fields() {
        let json = serde_json::to_string(&Cgroup::new("/a.slice")).expect("it is plain");
        assert_eq!(json, r#"{"cgroup":"/a.slice"}"#);
    }
}
