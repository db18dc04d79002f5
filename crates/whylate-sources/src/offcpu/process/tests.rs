// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt::Write as _;
use std::fs;

use super::*;
use crate::kernel::first_thread::tests::Headless;
use crate::offcpu::mappings::tests::Mapped;

fn processes() -> Processes {
    let mut processes = Processes::new(CallGraph::Rules, false);
    processes.begin_walk();
    processes
}

fn kind(found: &AtAddress) -> &'static str {
    match found {
        AtAddress::Code(..) => "code",
        AtAddress::NoFile => "no file",
        AtAddress::Nothing => "nothing",
        AtAddress::Later => "later",
    }
}

#[test]
fn reads_only_files_that_contain_frames() {
    let directory = tempfile::tempdir().expect("a directory");
    let mapped: Vec<Mapped> = (0..300)
        .map(|number| {
            let path = directory.path().join(number.to_string());
            fs::copy("/bin/true", &path).expect("copied");
            Mapped::new(&path)
        })
        .collect();
    let (mut processes, own) = (processes(), std::process::id());
    for mapped in &mapped[7..9] {
        assert_eq!(kind(&processes.find(1, own, mapped.mapping.start + 8)), "code");
    }
    let process = &processes.by_id[&1];
    assert!(process.mappings.list.len() > 300 && process.code.len() == 2, "{}", process.code.len());
    assert_eq!(kind(&processes.find(1, own, 8)), "nothing");
}

#[test]
fn reads_code_of_process_without_leader() {
    let process = Headless::start();
    let mut processes = processes();
    // The process is a fork of this one, and has the same code at the same addresses.
    let at = kind as fn(&AtAddress) -> &'static str as usize as u64;
    assert_eq!(kind(&processes.find(1, process.0, at)), "code");
    assert_eq!(processes.take_lost(), [("unread", 0), ("unread_files", 0), ("unread_perf_maps", 0)]);
}

#[test]
fn retries_unreadable_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("program");
    fs::copy("/bin/true", &path).expect("copied");
    let mapped = Mapped::new(&path);
    let (mut processes, own, at) = (processes(), std::process::id(), mapped.mapping.start);
    File::options().write(true).open(&path).and_then(|file| file.set_len(0)).expect("cut short");
    assert_eq!(kind(&processes.find(1, own, at)), "later");
    assert_eq!(processes.take_lost(), [("unread", 0), ("unread_files", 1), ("unread_perf_maps", 0)]);
    fs::write(&path, fs::read("/bin/true").expect("there")).expect("written");
    assert_eq!(kind(&processes.find(1, own, at)), "later", "not at once");
    assert!(!processes.is_retry_due(), "in two seconds");
    let now = Instant::now();
    let process = Arc::make_mut(processes.by_id.get_mut(&1).expect("it is known"));
    let Some(Code::Failed(retry)) = process.code.get_mut(&at) else { panic!("it has failed") };
    retry.due = now;
    processes.retry_at = Some(now);
    assert!(processes.is_retry_due() && !processes.is_retry_due());
    assert_eq!(kind(&processes.find(1, own, at)), "code");
}

#[test]
fn reads_code_of_replaced_mapping() {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = ["true", "false"].map(|name| directory.path().join(name));
    for path in &paths {
        let name = path.file_name().expect("a name");
        fs::copy(Path::new("/bin").join(name), path).expect("copied");
    }
    let mapped = Mapped::new(&paths[0]);
    let (mut processes, own, start) = (processes(), std::process::id(), mapped.mapping.start);
    assert_eq!(kind(&processes.find(1, own, start)), "code");
    let code = |processes: &Processes| match &processes.by_id[&1].code[&start] {
        Code::File(file) => Arc::clone(file),
        Code::Other | Code::Failed(_) => panic!("a file of code"),
    };
    let before = code(&processes);
    let mapped = mapped.replace(&paths[1]);
    assert_eq!(mapped.mapping.start, start);
    processes.begin_walk();
    let later = Instant::now().checked_add(Duration::from_secs(600));
    Arc::make_mut(processes.by_id.get_mut(&1).expect("it is known")).next_reading = later;
    assert_eq!(kind(&processes.find(1, own, 8)), "later", "maps was read recently");
    Arc::make_mut(processes.by_id.get_mut(&1).expect("it is known")).next_reading = None;
    assert_eq!(kind(&processes.find(1, own, 8)), "nothing");
    assert!(!Arc::ptr_eq(&before, &code(&processes)));
}

#[test]
fn drops_mappings_of_largest_processes() {
    let mut processes = processes();
    let mut add = |id: u32, mappings: u64| {
        let mut text = String::new();
        for number in 0..mappings {
            let start = 0x10_0000 + number * 0x2000;
            writeln!(text, "{start:08x}-{:08x} r-xp 00000000 fe:01 7 /bin/true", start + 0x1000).expect("memory");
        }
        processes.by_id.insert(id, Arc::new(Process::default()));
        let mappings = Mappings::read(text.as_bytes(), &[]).expect("it is read");
        processes.update(id, mappings, Duration::ZERO);
        processes.drop_mappings(id, 0x10_0000);
        assert!(processes.kept <= MAX_KEPT, "{}", processes.kept);
    };
    (1..=100).for_each(|id| add(id, 40));
    (101..=106).for_each(|id| add(id, 65_000));
    let lengths: Vec<usize> = (1..=106).map(|id| processes.by_id[&id].mappings.list.len()).collect();
    assert!(lengths[..100].iter().all(|&length| length == 40), "{lengths:?}");
    assert!(lengths[100..].iter().any(|&length| length <= 1), "{lengths:?}");
    let bytes: usize = processes.by_id.values().map(|process| process.mappings.bytes).sum();
    assert_eq!(processes.kept, bytes);
}

#[test]
fn unwinds_by_each_kind_of_rule() {
    // With sp = 0x100: the CFA is 0x120, with the return address below it, and the saved frame pointer below that.
    let word = |at: u64| [(0x118, 0xabc), (0x110, 0x200), (0x108, 0x120)].iter().find(|w| w.0 == at).map(|w| w.1);
    let rule = |base, cfa_offset, bp_offset| Rule { base, cfa_offset, bp_offset };
    let kept = super::super::rules::BP_KEPT;
    for (rule, bp, callers_bp) in [
        (rule(rule_base::RULE_SP, 0x20, kept), 7, 7),
        (rule(rule_base::RULE_SP, 0x20, -16), 7, 0x200),
        (rule(rule_base::RULE_BP, 0x10, -16), 0x110, 0x200),
        (rule(rule_base::RULE_AT_BP, -8, kept), 0x110, 0x200),
        (rule(rule_base::RULE_CHAIN, 0, kept), 0x110, 0x200),
    ] {
        assert_eq!(caller_of(rule, 0x100, bp, word), Some((0xabc, 0x120, callers_bp)), "{rule:?}");
    }
    for base in [rule_base::RULE_ROOT, rule_base::RULE_BROKEN] {
        assert_eq!(caller_of(Rule::plain(base), 0x100, 0x110, word), None);
    }
    // A caller's frame is never below.
    assert_eq!(caller_of(rule(rule_base::RULE_BP, 0x10, kept), 0x120, 0x110, word), None);
}
