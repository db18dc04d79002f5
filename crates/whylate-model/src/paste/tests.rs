// SPDX-License-Identifier: MIT OR Apache-2.0
//! Alterations that are undone, and text that is kept.

use super::*;
use crate::ftrace::Events;

fn read(text: &str) -> (Vec<String>, Vec<String>) {
    let mut lines = Lines::new(text.as_bytes(), Events, 8 << 10).expect("text");
    let (mut all, mut line) = (Vec::new(), String::new());
    while lines.next(&mut line).expect("it is in memory") {
        all.push(std::mem::take(&mut line));
    }
    (all, lines.undone())
}

const EVENTS: [&str; 3] = [
    "          <idle>-0     [000] d..2   100.000000: sched_switch: swapper/0:0 [120] R ==> my job:10 [120]",
    "          my job-10    [000] d..1   100.000500: irq_disable: caller=ring_lock+0x25 parent=ring_ioctl+0x40",
    "          my job-10    [000] d..1   100.004500: irq_enable: caller=ring_unlock+0x2f parent=ring_ioctl+0x88",
];

#[test]
fn strips_prefixes() {
    for (prefix, undone) in [
        ("> ", "quoting"),
        ("| ", "quoting"),
        ("JD> ", "quoting"),
        ("+", "signs of a patch"),
        ("[   12.345678] ", "stamps of a log"),
        ("<4>[   12.345678][  T123] ", "stamps of a log"),
        ("Nov 28 15:39:22 host kernel: ", "stamps of a log"),
        ("2026-11-28T15:39:22.123456+00:00 host kernel: ", "stamps of a log"),
        ("[2026-11-28 15:39:22] ", "stamps of a log"),
        ("15:39:22.123 ", "stamps of a log"),
        ("trace.txt:", "the name of a file in front of each line"),
    ] {
        let text: String = EVENTS.iter().map(|line| format!("{prefix}{line}\n")).collect();
        let (lines, was) = read(&text);
        let trimmed: Vec<&str> = lines.iter().map(|line| line.trim_start()).collect();
        assert_eq!(trimmed, EVENTS.map(str::trim_start), "{prefix}");
        assert_eq!(was, [undone], "{prefix}");
    }
    let numbered: String =
        EVENTS.iter().zip(7..).map(|(line, number)| format!("{number:>5} {}\n", line.trim_start())).collect();
    assert_eq!(read(&numbered).1, ["line numbers"]);
}

#[test]
fn keeps_thread_name_that_looks_like_quoting() {
    for name in ["> sh", "|sh", "a: b", "12: x", "[1.5] x"] {
        let text = format!("{0}\n{name}-7 [001] d..1 100.005: irq_enable: caller=a+0x1 parent=b+0x2\n{0}\n", EVENTS[1]);
        let (lines, undone) = read(&text);
        assert_eq!((lines.len(), undone), (3, Vec::new()), "{name}");
        assert!(lines[1].starts_with(name), "{}", lines[1]);
    }
}

#[test]
fn undoes_nested_alterations() {
    let quoted: String = EVENTS.iter().map(|line| format!("> > {line}\n")).collect();
    assert_eq!(read(&quoted), (EVENTS.map(str::to_owned).to_vec(), vec!["quoting".to_owned(); 2]));
    let mail = quoted.replace('=', "=3D").replace("100.00", "100=\n.00");
    let (lines, undone) = read(&mail);
    assert_eq!(
        (lines, undone.join(", ").as_str()),
        (EVENTS.map(str::to_owned).to_vec(), "quoting, quoting, quoted-printable")
    );
}

#[test]
fn joins_wrapped_lines() {
    // Between words.
    let text = EVENTS.map(|line| line.replace(" parent=", "\n    parent=").replace(" ==> ", "\n==> ")).join("\n");
    let (lines, undone) = read(&text);
    assert_eq!((lines, undone), (EVENTS.map(str::to_owned).to_vec(), vec!["3 line breaks within records".to_owned()]));
    // At the edge of a terminal, within words.
    let cut = |line: &str| format!("{}\n{}\n", &line[..86], &line[86..]);
    assert_eq!(read(&EVENTS.map(cut).concat()).0, EVENTS);
    // A complete record takes nothing from the text after it.
    let text = format!("{text}\nThat is all.\n");
    assert_eq!(read(&text).0[3], "That is all.");
}

#[test]
fn equals_sign_is_no_escape_without_others() {
    let text = format!("{}\n{}=3D\n", EVENTS[1], EVENTS[2]);
    assert_eq!(read(&text).1, Vec::<String>::new());
}

#[test]
fn decodes_entities_and_colors() {
    let page = EVENTS.map(|line| line.replace('<', "&lt;").replace('>', "&gt;")).join("<br>\n");
    assert_eq!(read(&format!("<pre>{page}</pre>")), (EVENTS.map(str::to_owned).to_vec(), vec!["HTML".to_owned()]));
    let colored = EVENTS.map(|line| format!("\x1b[01;31m\x1b[K{line}\x1b[m\n")).concat();
    assert_eq!(read(&colored).0, EVENTS);
    let both = format!("{}\n a&lt;b-7 [001] d..1 100.005000: irq_enable: caller=a parent=b\n", EVENTS[0]);
    assert!(read(&both).0[1].contains("a&lt;b"));
}

#[test]
fn decodes_numeric_entities_and_doubled_lines() {
    let page = EVENTS.map(|line| line.replace('<', "&#60;").replace('>', "&#x3E;")).join("\n\n");
    let (lines, undone) = read(&page);
    assert_eq!(undone, ["HTML", "blank lines between lines"]);
    assert_eq!(
        lines.iter().filter(|line| !line.trim().is_empty()).collect::<Vec<_>>(),
        EVENTS.iter().collect::<Vec<_>>()
    );
}

#[test]
fn detects_events_cut_in_one_column() {
    let fork = |comm: &str, child: &str| {
        format!(
            "{comm:>16}-7 [001] .... 1.000000: sched_process_fork: comm={comm} pid=7 child_comm=x child_pid={child}\n"
        )
    };
    let text = fork("a", "12")
        + &fork("bc", "3")
        + "    d-7 [001] .... 1.000001: irq_enable: caller="
        + &"a".repeat(60)
        + "\n";
    let width = text.lines().next().map_or(0, str::len);
    let cut = |text: &str| text.lines().map(|line| format!("{}\n", &line[..line.len().min(width)])).collect::<String>();
    for (text, expected) in [(cut(&text), [true, true, true]), (text, [false, false, false])] {
        let mut lines = Lines::new(text.as_bytes(), Events, 8 << 10).expect("text");
        let mut line = String::new();
        for expected in expected {
            assert!(lines.next(&mut line).expect("it is in memory"));
            assert_eq!(lines.is_cut(&line), expected, "{text}");
        }
    }
}

#[test]
fn single_non_ascii_byte_is_no_escape() {
    let text = format!("{}\n{}=DE\n", EVENTS[1].replace('=', " "), EVENTS[2].replace('=', " "));
    assert_eq!(read(&text).1, Vec::<String>::new());
}

#[test]
fn accepts_utf_16() {
    let units: Vec<u16> = EVENTS.join("\r\n").encode_utf16().collect();
    let little = |mark: &[u8]| [mark, &units.iter().flat_map(|unit| unit.to_le_bytes()).collect::<Vec<u8>>()].concat();
    let big: Vec<u8> = [0xfe, 0xff].into_iter().chain(units.iter().flat_map(|unit| unit.to_be_bytes())).collect();
    for bytes in [little(&[0xff, 0xfe]), little(&[]), big] {
        let mut lines = Lines::new(&bytes[..], Events, 8 << 10).expect("text");
        let mut line = String::new();
        assert!(lines.next(&mut line).expect("it is in memory"));
        assert_eq!(line, EVENTS[0]);
    }
    assert!(matches!(Lines::new(&[b'a', 0, 1, 2, 0, 0][..], Events, 99), Err(PasteError::Binary)));
}
