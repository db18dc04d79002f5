// SPDX-License-Identifier: MIT OR Apache-2.0
//! The user that a command runs as.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::anyhow;
use whylate_sources::AttachError;
use whylate_sources::kernel::credentials::{Credentials, may_change_user, run_as_user};

use crate::cli::UsageError;

/// The program that knows users of all sources (nsswitch.conf(5)). libc knows them too, but not in a static program.
const GETENT: &str = "/usr/bin/getent";
const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// A user of this system.
#[derive(Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    home: String,
    credentials: Credentials,
}

impl User {
    /// Finds a user by name or number.
    ///
    /// # Errors
    /// Fails if there is no such user, or this process may not change its user.
    pub fn find(wanted: &str) -> anyhow::Result<User> {
        let line = getent("passwd", wanted)
            .and_then(|text| entry(&text, wanted))
            .or_else(|| entry(&fs::read_to_string(PASSWD).ok()?, wanted));
        let mut user = line.ok_or_else(|| {
            UsageError(anyhow!("no user of this system is named {wanted:?} (name one that `getent passwd` lists)"))
        })?;
        if !may_change_user() {
            let remedy = "run as root, or grant CAP_SETUID and CAP_SETGID";
            return Err(
                AttachError::Unsupported(format!("not permitted to run a command as another user ({remedy})")).into()
            );
        }
        let groups = match getent("initgroups", &user.name) {
            Some(text) => numbers_after(&text, &user.name),
            None => fs::read_to_string(GROUP).map(|text| groups_of(&text, &user.name)).unwrap_or_default(),
        };
        let Credentials { gid, groups: all, .. } = &mut user.credentials;
        all.extend(groups.into_iter().filter(|group| group != gid));
        Ok(user)
    }

    /// Makes a command run as this user.
    pub fn runs(&self, command: &mut Command) {
        command.env("HOME", &self.home).env("USER", &self.name).env("LOGNAME", &self.name);
        run_as_user(command, &self.credentials);
    }
}

/// Returns the output of getent(1); `None` if it finds nothing or is not installed.
fn getent(database: &str, key: &str) -> Option<String> {
    let mut command = Command::new(GETENT);
    command.env_clear().args(["--", database, key]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}

/// Finds a user in the text of passwd(5), by name, or else by UID.
fn entry(text: &str, wanted: &str) -> Option<User> {
    let all = || text.lines().filter_map(parsed);
    let number = || wanted.parse().ok().filter(|_| wanted.bytes().all(|byte| byte.is_ascii_digit()));
    all().find(|user| user.name == wanted).or_else(|| {
        let uid: u32 = number()?;
        all().find(|user| user.credentials.uid == uid)
    })
}

fn parsed(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let (name, _password, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let (_comment, home, _shell) = (fields.next()?, fields.next()?, fields.next()?);
    // The kernel takes the largest ID for "no change".
    let id = |field: &str| field.parse().ok().filter(|&id| id != u32::MAX);
    let (uid, gid) = (id(uid)?, id(gid)?);
    let credentials = Credentials { uid, gid, groups: vec![gid] };
    Some(User { name: name.to_owned(), home: home.to_owned(), credentials })
}

/// Parses the GIDs in a line of `getent initgroups`, which begins with the name.
fn numbers_after(line: &str, name: &str) -> Vec<u32> {
    let rest = line.strip_prefix(name).unwrap_or_default();
    rest.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Returns the GIDs of the groups in the text of group(5) that list a user.
fn groups_of(text: &str, name: &str) -> Vec<u32> {
    let of_line = |line: &str| {
        let mut fields = line.split(':');
        let (gid, members) = (fields.nth(2)?, fields.next()?);
        members.split(',').any(|member| member.trim() == name).then(|| gid.parse().ok())?
    };
    text.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "\
root:x:0:0:root:/root:/bin/bash
+::::::
broken:x:12
nobody:x:65534:65534::/nonexistent:/usr/sbin/nologin
unchanged:x:4294967295:7::/:/bin/sh
4711:x:1001:100::/home/odd:/bin/sh
al:x:4711:100:Al,,,:/home/al:/bin/sh
";

    #[test]
    fn a_user_is_found_by_name_and_by_number() {
        let uid = |wanted: &str| entry(USERS, wanted).map(|user| user.credentials.uid);
        assert_eq!((uid("root"), uid("nobody"), uid("65534")), (Some(0), Some(65_534), Some(65_534)));
        let al = entry(USERS, "al").expect("listed");
        assert_eq!(
            (al.home.as_str(), &al.credentials),
            ("/home/al", &Credentials { uid: 4711, gid: 100, groups: vec![100] })
        );
        // A name comes before a number.
        assert_eq!((uid("4711"), uid("1001")), (Some(1001), Some(1001)));
        for none in ["", "a", "al:x", "+4711", "-1", "4294967295", "unchanged", "broken", "12", "nobody\n"] {
            assert_eq!(uid(none), None, "{none:?}");
        }
    }

    #[test]
    fn supplementary_groups_are_those_that_list_the_user() {
        assert_eq!(numbers_after("al                    4 27 1000\n", "al"), [4, 27, 1000]);
        assert_eq!(numbers_after("a user 5               4\n", "a user 5"), [4]);
        let groups = "root:x:0:\nadm:x:4:syslog,al\nalso:x:5:also\nsudo:x:27:al\nbroken:x\n";
        assert_eq!(groups_of(groups, "al"), [4, 27]);
    }
}
