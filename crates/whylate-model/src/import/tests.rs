// SPDX-License-Identifier: MIT OR Apache-2.0
//! Texts in each of the formats, and what is read of them.

use proptest::prelude::*;

use super::*;

/// The columns as procstat pads them: 5, 6, 16 and 16 characters wide.
const PADDED: &str = "\
  PID    TID COMM             TDNAME           KSTACK                       
    0 100000 kernel           swapper          mi_switch sleepq_timedwait _sleep swapper btext 
    0 100023 kernel           firmware taskq   mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline 
    0 100025 kernel           kqueue taskq     mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline 
  812 100110 nginx            -                mi_switch sleepq_catch_signals sleepq_wait_sig _sleep kern_kevent sys_kevent amd64_syscall Xfast_syscall 
";

#[test]
fn refuses_overflowing_counts() {
    let read = |text: String| Imported::read(&text, Names::Thread);
    let mut largest = read(format!("a;b {}\na;c 1\n", u64::MAX - 1)).expect("as much as there can be");
    assert!(matches!(largest.merge(largest.clone()), Err(ImportError::CountsTooLarge)));
    for twice in ["a", "b"].map(|other| format!("a {0}\n{other} {0}\n", u64::MAX)) {
        assert!(matches!(read(twice), Err(ImportError::CountsTooLarge)));
    }
}

#[test]
fn counts_and_skips_too_deep_stacks() {
    let deep = |frames: usize| format!("{}f 1\n", "f;".repeat(frames - 1));
    let read = |text: &str| {
        let read = Imported::read(text, Names::Thread).map(|read| (read.stacks.len(), read.too_long));
        read.map_err(|error| error.to_string())
    };
    assert_eq!(read(&format!("{}{}", deep(DEEPEST), deep(DEEPEST + 1))), Ok((1, 1)));
    assert_eq!(read(&deep(2_000_000)), Err(ImportError::TooLong.to_string()));
    assert_eq!(read(&format!("{} 1\na 1\n", "f".repeat(text::LONGEST_LINE + 1))), Ok((1, 1)));
    assert_eq!(read(&format!("==> a <==\n{}\n==> b <==\n[<0>] g\n", "[<0>] f\n".repeat(DEEPEST + 1))), Ok((1, 1)));
    assert_eq!(
        read(&format!("0 1 kernel swapper mi_switch{}\n", " f".repeat(DEEPEST))),
        Err(ImportError::TooLong.to_string())
    );
}

#[test]
fn cuts_long_names() {
    let long = "f".repeat(70_000);
    for text in [
        format!("{long};b 1\n"),
        format!("==> {long} <==\n[<0>] {long}+0x1/0x2\n"),
        format!("0 1 {long} {long} mi_switch {long}\n"),
    ] {
        let read = Imported::read(&text, Names::Thread).expect("it is one of the forms");
        let names = || read.stacks.keys().flat_map(|(labels, frames)| labels.iter().chain(frames));
        assert!(
            names().all(|name| name.len() <= crate::name::MAX_BYTES) && names().any(|name| name.ends_with("[cut]"))
        );
    }
}

#[test]
fn number_at_end_of_name_is_no_count() {
    let read = Imported::read("a;worker 9223372036854775808 1\nb 2\n", Names::Thread).expect("folded lines");
    assert_eq!(read.lines(Order::RootFirst), ["a;worker_9223372036854775808 1", "b 2"]);
}

#[test]
fn refuses_lines_with_several_counts() {
    for (text, counts) in [("a;b 3 5\na;c 0 7\n", 2), ("# diff\na;b 1 2 3\na;c 4 5 6\n", 3), ("a;b 3 5\n", 2)] {
        let refused = Imported::read(text, Names::Process).expect_err("which count is meant is not known").to_string();
        assert!(refused.starts_with(&format!("each of its lines has {counts} counts")), "{refused}");
    }
}

#[test]
fn parses_procstat_with_offsets_and_without_columns() {
    let wide = "\
  PID    TID COMM             TDNAME           KSTACK                       
  812 100110 Web Content      -                mi_switch+0xbc _sleep+0x29b sys_kevent+0x61 fast_syscall_common+0xf8
  813 100111 Web Content      io worker        mi_switch+0xbc _sleep+0x29c sys_kevent+0x74 fast_syscall_common+0xf8
";
    let read = |text: &str, names| Imported::read(text, names).expect("it is procstat's").lines(Order::RootFirst);
    assert_eq!(read(wide, Names::Nothing), ["fast_syscall_common;sys_kevent;_sleep;mi_switch 2"]);
    assert_eq!(read(wide, Names::Process), ["Web Content;fast_syscall_common;sys_kevent;_sleep;mi_switch 2"]);
    assert_eq!(read(wide, Names::Thread)[1], "Web Content;io worker;fast_syscall_common;sys_kevent;_sleep;mi_switch 1");
    // A long name moves the stack out of its column; no letter is lost.
    let moved = "  PID    TID COMM             TDNAME           KSTACK\n    5 100042 a_much_longer_process_name thread 7         \
                 mi_switch _sleep fork_trampoline\n";
    assert_eq!(read(moved, Names::Process), ["a_much_longer_process_name;fork_trampoline;_sleep;mi_switch 1"]);
    // Without a header, and without the column of thread names.
    for text in
        ["5 100042 ctld mi_switch+0xe2 fork_trampoline+0xe\n", "See:\n  5 100042 ctld - mi_switch fork_trampoline\n"]
    {
        assert_eq!(read(text, Names::Thread), ["ctld;-;fork_trampoline;mi_switch 1"]);
    }
}

#[test]
fn wrapped_stacks_are_joined_or_refused() {
    let read =
        |text: &str| Imported::read(text, Names::Process).map(|read| (read.lines(Order::RootFirst), read.unread));
    let text = "  PID    TID COMM TDNAME KSTACK\n 4510 100912 logger - mi_switch sleepq_switch\n    _cv_wait_sig ttydisc_read\n  \
                sys_read fast_syscall_common\nThat is all.\n";
    let expected = "logger;fast_syscall_common;sys_read;ttydisc_read;_cv_wait_sig;sleepq_switch;mi_switch 1";
    assert_eq!(read(text).expect("one stack"), (vec![expected.to_owned()], 1));
    // Cut at the edge of a terminal within a word: with a space it would be two names, without it one.
    let text = "1 2 logger - mi_switch sleepq_sw\nitch fast_syscall_common\n";
    let refused = read(text).expect_err("it cannot be known").to_string();
    assert!(refused.contains("wrapped"), "{refused}");
    let text =
        "==> /proc/9/stack <==\n[<ffffffffc0411a2f>]\ntxg_wait_open+0xaf/0xe0\n[poolfs]\n[<0>] vfs_write+0x1/0x2\n";
    assert_eq!(read(text).expect("one stack").0, ["/proc/9/stack;vfs_write;txg_wait_open 1"]);
}

#[test]
fn parses_end_marker_of_old_kernels() {
    for end in ["[<ffffffffffffffff>] 0xffffffffffffffff", "[<ffffffff>] 0xffffffff"] {
        let text =
            format!("[<c1>] a+0x1/0x2\n[<c2>] ? guess+0x1/0x2\n[<c3>] b+0x1/0x2\n{end}\n[<c1>] a+0x1/0x2\n{end}\n");
        let read = Imported::read(&text, Names::Process).expect("two stacks");
        assert_eq!((read.lines(Order::RootFirst), read.unread), (vec!["a 1".to_owned(), "b;a 1".to_owned()], 1));
    }
    let text = "    $ sudo cat /proc/812/stack\n    [<ffffffff810f7a56>] a+0x1/0x2\n";
    assert_eq!(Imported::read(text, Names::Process).expect("a stack").lines(Order::RootFirst), ["/proc/812/stack;a 1"]);
}

#[test]
fn marks_and_counts_truncated_stacks() {
    let read = |text: &str| {
        let read = Imported::read(text, Names::Nothing).expect("stacks");
        (read.lines(Order::RootFirst), read.cut, read.unread)
    };
    let two = |lines: [&str; 2]| lines.map(str::to_owned).to_vec();
    // In one column; at an ellipsis; and between words.
    for (end, last) in
        [("_sle", "_sle[cut]"), ("_sle...", "_sle[cut]"), ("_sle\u{2026}", "_sle[cut]"), ("", "mi_switch")]
    {
        let text = format!("1 2 a - mi_switch {end}\n3 4 b - mi_switch {end}\n5 6 c - mi_switch fork_trampoline\n");
        let text = if end.is_empty() { text.replace("switch \n", "switch\n") } else { text };
        let (lines, cut, unread) = read(&text.replace(" fork", if end == "_sle" { "\n" } else { " fork" }));
        let expected = if end.is_empty() { "mi_switch 2".to_owned() } else { format!("{last};mi_switch 2") };
        assert!(lines.contains(&expected), "{lines:?}");
        assert_eq!(cut, if end == "_sle" { 3 } else { 2 }, "{end}: {lines:?} {unread}");
    }
    let dump = "[<0>] futex_wait+0x1/0x2\n[<0>] do_fu\n[<0>\n[<0>] entry+0x1/0x2\n";
    assert_eq!(read(dump), (vec!["entry;[cut];do_fu[cut];futex_wait 1".to_owned()], 2, 0));
    // The counts may have had more digits.
    let folded = "a;bbbbb 12\na;cccccc 3\na;b 120\na;dddddddd\n";
    assert_eq!(read(folded), (vec!["a;b 120".to_owned()], 0, 3));
    assert_eq!(read("a;b 1\na;c 12\n").0, two(["a;b 1", "a;c 12"]));
}

#[test]
fn stacks_of_files_in_a_row_stay_apart() {
    let read = |text: &str| Imported::read(text, Names::Process).expect("stacks").lines(Order::RootFirst);
    let text = "\
[<0>] futex_wait+0x1/0x2
[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e
[<0>] worker_thread+0x1/0x2
[<0>] kthread+0x1/0x2
[<0>] ret_from_fork+0x1/0x2
[<0>] ret_from_fork_asm+0x1a/0x30
[<0>] hrtimer_nanosleep+0xa4/0x128
[<0>] __arm64_sys_clock_nanosleep+0xcc/0x1a0
[<0>] invoke_syscall+0x48/0x118
[<0>] el0_svc_common.constprop.0+0xc8/0xe8
[<0>] do_el0_svc+0x20/0x30
[<0>] el0_svc+0x34/0xe0
[<0>] el0t_64_sync_handler+0x120/0x130
[<0>] el0t_64_sync+0x190/0x198
[<0>] do_wait+0x1/0x2
[<0>] ret_fast_syscall+0x0/0x28
[<0>] 0xbe8c1198
[<0>] folio_wait_bit+0x1/0x2
[<0>] asm_exc_page_fault+0x1/0x2
[<0>] fault_in_iov_iter_readable+0x1/0x2
[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e
[<0>] folio_wait_bit+0x1/0x2
[<0>] asm_exc_page_fault+0x1/0x2
[<0>] pipe_read+0x1/0x2
[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e
";
    let expected = [
        "asm_exc_page_fault;folio_wait_bit 1",
        "0xbe8c1198;ret_fast_syscall;do_wait 1",
        "el0t_64_sync;el0t_64_sync_handler;el0_svc;do_el0_svc;el0_svc_common.constprop.0;invoke_syscall;\
         __arm64_sys_clock_nanosleep;hrtimer_nanosleep 1",
        "entry_SYSCALL_64_after_hwframe;fault_in_iov_iter_readable;asm_exc_page_fault;folio_wait_bit 1",
        "entry_SYSCALL_64_after_hwframe;futex_wait 1",
        "entry_SYSCALL_64_after_hwframe;pipe_read 1",
        "ret_from_fork_asm;ret_from_fork;kthread;worker_thread 1",
    ];
    let mut expected = expected.map(str::to_owned).to_vec();
    expected.sort_unstable();
    assert_eq!(read(text), expected);
}

#[test]
fn output_of_grep_names_the_file_of_each_stack() {
    let of =
        |pid: usize| format!("/proc/{pid}/stack:[<0>] futex_wait+0x1/0x2\n/proc/{pid}/stack:[<0>] do_exit+0x1/0x2\n");
    for files in [1, 2, 40] {
        let text: String = (1..=files).map(of).collect();
        let read = Imported::read(&text, Names::Process).expect("stacks");
        assert_eq!((read.stacks.len(), read.unread, read.undone.len()), (files, 0, 0), "{:?}", read.stacks);
        assert!(read.lines(Order::RootFirst).contains(&"/proc/1/stack;do_exit;futex_wait 1".to_owned()));
    }
}

#[test]
fn blanks_before_counts_are_no_part_of_names() {
    let read =
        |text: &str| Imported::read(text, Names::Nothing).map(|read| (read.lines(Order::RootFirst), read.unread));
    let two = |lines: [&str; 2]| (lines.map(str::to_owned).to_vec(), 0);
    assert_eq!(read("main;a;c\t5\nmain;bb;c\t7\n").expect("folded"), two(["main;a;c 5", "main;bb;c 7"]));
    assert_eq!(read("a;b 5\na;b  3\na;c 1\n").expect("folded"), two(["a;b 8", "a;c 1"]));
    for text in ["a;b\t10\t20\na;c\t1\t2\n", "a;b 10  20\na;c 1  2\n", "a;b 10 20\na;c 1 2\ntotal 60\n"] {
        let refused = read(text).expect_err("which count is meant is not known").to_string();
        assert!(refused.starts_with("each of its lines has 2 counts"), "{refused}");
    }
}

#[test]
fn rejects_commands_and_sentences_as_folded_lines() {
    let text =
        "$ head -n 20\nme@host:~$ uptime -s 2\nIt happens since 12\nIt has happened since release 12\na;b 1\nmain 2\n";
    let read = Imported::read(text, Names::Nothing).expect("folded lines");
    assert_eq!(
        (read.lines(Order::RootFirst), read.unread),
        (vec!["It happens since 12".to_owned(), "a;b 1".to_owned(), "main 2".to_owned()], 3)
    );
}

#[test]
fn sentence_or_prefix_before_a_stack_names_no_thread() {
    for line in ["this is what I see:", "Nov 28 15:39:22 host kernel: Nov 28 15:39:22 host kernel:"] {
        let text =
            format!("{line}\n[<ffffffff81041eb2>] SyS_futex+0x7f/0x180\n[<ffffffffffffffff>] 0xffffffffffffffff\n");
        let imported = Imported::read(&text, Names::Thread).expect("a stack");
        assert_eq!(imported.lines(Order::RootFirst), ["SyS_futex 1"], "{line}");
    }
}

#[test]
fn numbers_are_no_folded_line() {
    assert_eq!((folded("812 100110"), folded("2026-11-28T15:39:22   0 100000")), (None, None));
    assert_eq!((folded("a;812 3"), folded("worker 1 100")), (Some(("a;812", 3)), Some(("worker 1", 100))));
}

#[test]
fn process_name_keeps_blanks_if_thread_is_unnamed() {
    let read = Imported::read("5 100042 Web Content - mi_switch fork_trampoline\n", Names::Thread).expect("a stack");
    assert_eq!(read.lines(Order::RootFirst), ["Web Content;-;fork_trampoline;mi_switch 1"]);
}

#[test]
fn procstat_matches_existing_shell_script() {
    for text in [PADDED.to_owned(), squeezed(PADDED)] {
        let read = |names| Imported::read(&text, names).expect("it is procstat's").lines(Order::LeafFirst);
        assert_eq!(
            read(Names::Nothing),
            [
                "mi_switch;sleepq_catch_signals;sleepq_wait_sig;_sleep;kern_kevent;sys_kevent;amd64_syscall;Xfast_syscall 1",
                "mi_switch;sleepq_timedwait;_sleep;swapper;btext 1",
                "mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 2",
            ]
        );
        assert_eq!(
            read(Names::Process)[1..],
            [
                "kernel;mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 2",
                "nginx;mi_switch;sleepq_catch_signals;sleepq_wait_sig;_sleep;kern_kevent;sys_kevent;amd64_syscall;Xfast_syscall 1",
            ]
        );
        assert_eq!(
            read(Names::Thread)[0],
            "kernel;firmware taskq;mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 1"
        );
    }
}

fn squeezed(text: &str) -> String {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
}

#[test]
fn skips_and_counts_surrounding_text() {
    let text = format!("My threads:\n\nprocstat -ka\n\n{}[...]\n1.27 real\n", squeezed(PADDED));
    let read = Imported::read(&text, Names::Process).expect("it is procstat's");
    assert_eq!((read.stacks.values().sum::<u64>(), read.unread), (4, 4));
}

#[test]
fn merges_files_as_samples() {
    let mut all = Imported::read(PADDED, Names::Process).expect("it is procstat's");
    all.merge(Imported::read(PADDED, Names::Process).expect("it is procstat's")).expect("small counts");
    assert!(
        all.lines(Order::RootFirst).contains(&"kernel;btext;swapper;_sleep;sleepq_timedwait;mi_switch 2".to_owned())
    );
}

#[test]
fn puts_outermost_frame_first_in_every_format() {
    let dump = "==> kernel <==\n[<0>] mi_switch+0x1/0x2\n[<0>] _sleep+0x1/0x2\n[<0>] btext+0x1/0x2\n";
    let procstat = "0 100000 kernel swapper mi_switch _sleep btext\n";
    for text in [dump, procstat, "kernel;btext;_sleep;mi_switch 1\n"] {
        let read = Imported::read(text, Names::Process).expect("it is one of the forms");
        assert_eq!(read.lines(Order::RootFirst), ["kernel;btext;_sleep;mi_switch 1"]);
    }
    let leaf_first = |text| Imported::read(text, Names::Process).expect("a form").lines(Order::LeafFirst);
    assert_eq!(leaf_first(dump), ["kernel;mi_switch;_sleep;btext 1"]);
    assert_eq!(leaf_first(procstat), leaf_first(dump));
}

#[test]
fn parses_linux_dump_with_headers() {
    let text = "==> /proc/1/stack <==\n[<0>] do_epoll_wait+0x6c/0x90\n[<0>] f+0x1/0x2 [ext4]\n\n\
                [<0>] pipe_read+0x1/0x2\n";
    let read = |names| Imported::read(text, names).expect("it is a dump").lines(Order::RootFirst);
    assert_eq!(read(Names::Process), ["/proc/1/stack;f;do_epoll_wait 1", "pipe_read 1"]);
    assert_eq!(read(Names::Nothing), ["f;do_epoll_wait 1", "pipe_read 1"]);
}

#[test]
fn keeps_folded_lines() {
    let read = Imported::read("a;b c;d 3\n# comment\na;b c;d 4\nbroken\n", Names::Process).expect("folded");
    assert_eq!((read.lines(Order::RootFirst), read.unread), (vec!["a;b c;d 7".to_owned()], 1));
}

#[test]
fn refuses_other_text() {
    assert!(matches!(Imported::read("hello\nworld\n", Names::Process), Err(ImportError::UnknownForm)));
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in "(?s).*") {
        if let Ok(read) = Imported::read(&text, Names::Thread) {
            prop_assert!(read.lines(Order::RootFirst).iter().all(|line| !line.contains('\n')));
        }
    }

    #[test]
    fn arbitrary_procstat_line_does_not_panic(rest in "[ -~]*", column in 0_usize..80) {
        let header = Header::parse(&format!("PID{}COMM TDNAME KSTACK", " ".repeat(column))).unwrap_or_default();
        Thread::parse(&format!("1 2 {rest}"), &header);
    }
}

/// Texts altered twice: undoing one alteration alone would give wrong names.
#[test]
fn two_alterations_are_undone_or_refused() {
    let read = |text: &str| Imported::read(text, Names::Thread).map(|read| read.lines(Order::RootFirst));
    let numbered = "It happens since release 12\n\n     1\tPID    TID COMM   TDNAME KSTACK\n     2\t    0 100000 kernel a      \
                    mi_switch _sleep btext\n\nThree times\n";
    assert_eq!(read(numbered).expect("a stack"), ["kernel;a;btext;_sleep;mi_switch 1"]);
    let returns = "=3D=3D> /proc/8/stack <=3D=3D=0D\n[<0>] a+0x1/0x2=0D\n[<ffffffffffffffff>] 0xffffffffffffffff=0D\n";
    assert_eq!(read(returns).expect("a stack"), ["/proc/8/stack;a 1"]);
    let escaped = "&gt; ==&amp;gt; /proc/8/stack &amp;lt;==\n&gt; [&amp;lt;0&amp;gt;] a+0x1/0x2\n";
    assert_eq!(read(escaped).expect("a stack"), ["/proc/8/stack;a 1"]);
    let quoted = "    | nginx;ep_poll;schedule 12\n    | my server;do_futex;schedule 3\n";
    assert_eq!(read(quoted).expect("stacks"), ["my server;do_futex;schedule 3", "nginx;ep_poll;schedule 12"]);
    let blanks = "[<0>] a+0x1/0x2\n\n\n\n[<0>] b+0x1/0x2\n\n\n\n[<0>] c+0x1/0x2\n\n\n\n";
    assert_eq!(read(blanks).expect("a stack"), ["c;b;a 1"]);
    let cut_header = "==> /proc/8/sta...\n[<0>] a+0x1/0x2\n";
    assert_eq!(read(cut_header).expect("a stack"), ["[cut];a 1"]);
    // Timestamped, then wrapped: a continuation line looks like a record.
    let wrapped = "Nov 28 15:39:22 host kernel: my server;do_futex;fute\nx_wait;schedule 3\n\
                   Nov 28 15:39:22 host kernel: nginx;ep_poll;schedule \n12\n";
    assert!(matches!(read(wrapped), Err(ImportError::Paste(PasteError::Wrapped))), "{:?}", read(wrapped));
    // A wrapped procstat line of a log without its header is no folded line.
    let stamped =
        "Nov 28 15:39:22 host kernel: <pre>    0 100000\n        kernel           swapper          mi_switch</pre>\n";
    assert!(matches!(read(stamped), Err(ImportError::UnknownForm)), "{:?}", read(stamped));
}

/// Files that no program has altered, with something that looks like an alteration.
#[test]
fn good_files_are_not_taken_for_altered_ones() {
    let read = |text: &str| {
        let read = Imported::read(text, Names::Process).unwrap_or_else(|error| panic!("{error}: {text}"));
        (read.lines(Order::RootFirst), read.cut, read.undone)
    };
    let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>();
    let page = "nginx;std::vector&lt;int&gt;;malloc 4\nswapper;&lt;idle&gt;;schedule 3\n";
    assert_eq!(read(page).0, lines(&["nginx;std::vector<int>;malloc 4", "swapper;<idle>;schedule 3"]));
    let stack = "[<0>] futex_wait+0x1/0x2\n[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e\n";
    let headed = |headers: [&str; 2]| read(&format!("{}\n{stack}{}\n{stack}", headers[0], headers[1]));
    let of = |label: &str| format!("{label};entry_SYSCALL_64_after_hwframe;futex_wait 1");
    for headers in [["=== 812 ===", "=== 909 ==="], ["== nginx ==", "== sshd =="], ["15:39:22", "15:39:23"]] {
        assert_eq!(headed(headers), (headers.map(of).to_vec(), 0, Vec::new()));
    }
    let prompt = format!("$ cat /proc/$(pidof nginx)/stack\n{stack}");
    assert_eq!(read(&prompt).1, 0);
    // A web page's blank line after a sentence.
    let prose = format!("I ran cat /proc/4711/stack as root and this is what it printed:\n\u{a0}\n{stack}");
    assert_eq!(read(&prose).0, vec![of("/proc/4711/stack")]);
    // A soft break before an empty line ends the line.
    let soft = "=3D=3D> /proc/1/stack <=3D=3D\n[<0>] a+0x1/0x2=\n\n=3D=3D> /proc/2/stack <=3D=3D\n[<0>] b+0x1/0x2\n";
    assert_eq!(read(soft).0, lines(&["/proc/1/stack;a 1", "/proc/2/stack;b 1"]));
    let replies = "> [<0>] a+0x1/0x2\n>\n\nYes.\n\n> [<0>] b+0x1/0x2\n>\n\nNo.\n";
    assert_eq!(read(replies).0.len(), 2);
    let two = "  PID    TID COMM TDNAME KSTACK\n12345 100100 nginx - mi_switch _sleep fast_syscall_common\n    6 100042 \
               pagedaemon - mi_switch _sleep fork_trampoline\n";
    assert_eq!(read(two).2, lines(&[]));
    // Separators of lines in Unicode are blanks of several bytes.
    let separators = "  \u{2028}[<0>] a+0x1/0x2\n  \u{2029}[<0>] b+0x1/0x2\n";
    assert_eq!(read(separators).0.len(), 1);
}
