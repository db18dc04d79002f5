// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fs;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::process;

use super::*;
use crate::offcpu::remote_files::RemoteFiles;

/// A perf map of this process under another PID, as in a PID namespace.
struct Written {
    path: PathBuf,
    identity: Identity,
    list: List,
    files: RemoteFiles,
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Written {
    fn new(name: &str) -> Self {
        let own_pid = format!("{}-{name}", process::id());
        let path = PathBuf::from(format!("/tmp/perf-{own_pid}.map"));
        let identity = Identity { own_pid, ..Identity::read(process::id()).expect("this process is there") };
        Written { path, identity, list: List::default(), files: RemoteFiles::default() }
    }

    fn write(&self, text: &str) {
        fs::write(&self.path, text).expect("written");
    }

    fn append(&self, text: &str) {
        let file = OpenOptions::new().append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).expect("appended");
    }

    fn turn(&mut self) -> Turn {
        self.list.read(process::id(), &self.identity, &mut self.files)
    }

    /// The names at these addresses, after all turns.
    fn names(&mut self, addresses: &[u64]) -> Vec<String> {
        while self.turn().has_more {}
        addresses.iter().map(|at| self.list.code.name_at(*at).unwrap_or_default()).collect()
    }

    fn other_time(&self) {
        // An mtime advances with the timer interrupt.
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn reads_only_appended_lines() {
    let mut map = Written::new("appended");
    map.write("1000 10 f\n2000 10 ha");
    assert_eq!(map.names(&[0x1000, 0x2000]), ["f", "ha"]);
    assert_eq!(map.turn(), Turn::default(), "nothing has changed");
    let read_to = map.list.read_to;
    map.append("lf\n1000 10 again\n");
    assert_eq!((read_to, map.names(&[0x1000, 0x2000])), (10, vec!["again".to_owned(), "half".to_owned()]));
    assert_eq!(map.list.read_to, 37);
}

#[test]
fn rereads_rewritten_file() {
    let mut map = Written::new("anew");
    map.write("1000 10 first\n");
    assert_eq!(map.names(&[0x1000, 0x3000]), ["first", ""]);
    // Cut short, replaced, and written over by as much and by more.
    for text in ["1 1 a\n", "3000 10 b\n", "3000 10 c\n", "3000 10 d\n4000 10 more\n"] {
        map.other_time();
        map.write(text);
        let name = text.split([' ', '\n']).nth(2).expect("a name");
        let address = u64::from_str_radix(text.split(' ').next().expect("an address"), 16).expect("a number");
        assert_eq!(map.names(&[0x1000, address]), ["", name], "{text}");
    }
    fs::remove_file(&map.path).expect("removed");
    map.write("3000 10 another file\n");
    assert_eq!(map.names(&[0x3000, 0x4000]), ["another file", ""]);
    fs::remove_file(&map.path).expect("removed");
    assert_eq!(map.names(&[0x3000]), ["another file"], "names of a process that ends are kept");
}

#[test]
fn ignores_file_of_other_user_or_earlier_process() {
    let mut map = Written::new("left");
    map.write("1000 10 f\n");
    map.identity.started += 3_600 * rustix::param::clock_ticks_per_second();
    assert_eq!(map.names(&[0x1000]), [""], "it was there before the process");
    map.identity = Identity { own_pid: map.identity.own_pid.clone(), ..Identity::read(process::id()).expect("there") };
    if rustix::process::getuid().is_root() {
        std::os::unix::fs::chown(&map.path, Some(65_534), None).expect("root may");
        assert_eq!(map.names(&[0x1000]), [""], "it is another user's");
        std::os::unix::fs::chown(&map.path, Some(0), None).expect("root may");
    }
    assert_eq!(map.names(&[0x1000]), ["f"]);
}

#[test]
fn reads_large_file_in_parts_and_drops_oldest_lines() {
    let mut map = Written::new("large");
    let line = |at: u64| format!("{:x} 10 function{at}{}\n", at * 16, "x".repeat(180));
    let lines: u64 = 100_000;
    map.write(&(0..lines).map(line).collect::<String>());
    let mut turns = Vec::new();
    loop {
        turns.push(map.turn());
        assert!(map.list.bytes() <= MAX_BYTES);
        if !turns.last().is_some_and(|turn| turn.has_more) {
            break;
        }
    }
    assert!(turns.len() >= 19 && turns.iter().any(|turn| turn.has_lost), "{turns:?}");
    let names = map.names(&[0, (lines - 1) * 16]);
    assert_eq!((names[0].as_str(), names[1].starts_with("function99999x")), ("", true));
}

#[test]
fn truncates_name_longer_than_a_part() {
    let mut map = Written::new("long");
    map.write(&format!("1000 10 {}\n2000 10 next\n", "A".repeat(3 << 20)));
    let names = map.names(&[0x1000, 0x2000]);
    assert_eq!((names[0].ends_with("A[cut]"), names[1].as_str()), (true, "next"));
}

#[test]
fn reads_only_end_of_huge_file() {
    let mut map = Written::new("huge");
    map.write("1000 10 first\n");
    let file = OpenOptions::new().write(true).open(&map.path).expect("there");
    file.set_len(MAX_FILE_BYTES + (8 << 20)).expect("a hole");
    map.append("\n2000 10 last\n");
    assert!(map.turn().has_lost);
    assert_eq!(map.names(&[0x1000, 0x2000]), ["", "last"]);
}
