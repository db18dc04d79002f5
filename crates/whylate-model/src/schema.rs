// SPDX-License-Identifier: MIT OR Apache-2.0
//! Generates docs/schema-1.json from the types, and checks that it is not stale and that snapshots are valid by it.

mod validate;

use std::collections::BTreeMap;
use std::fs;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::blame::{Evidence, TimerEvidence};
use crate::cgroup::Cgroup;
use crate::diff::Diff;
use crate::holders::{Chain, Holder};
use crate::object::{Object, ObjectKind, Peer, UnfinishedWait};
use crate::overview::Overview;
use crate::path::PathSegment;
use crate::path::budget::ProgramReport;
use crate::path::command::CommandReport;
use crate::recording::{Account, Clock, End, Gap, Header, Kept, Line};
use crate::snapshot::{Sleeper, Unexplained};
use crate::sources::CARDS;
use crate::{
    Cause, CauseKind, Histogram, LateEvent, Probe, Series, Snapshot, Stack, Steps, Wait, WaitClass, Waker, WokenBy,
};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schema-1.json");

/// A line of a recording that is not a snapshot.
#[derive(JsonSchema)]
#[serde(tag = "line", rename_all = "snake_case")]
#[expect(dead_code, reason = "only its schema is used")]
enum RecordingLine {
    Header(Header),
    Account(Account),
    Clock(Clock),
    Gap(Gap),
    Kept(Kept),
    End(End),
}

/// Returns the schema of all that `--json` prints as these types, and of a recording's lines.
fn generated() -> Value {
    let mut generator = SchemaSettings::draft2020_12().for_serialize().into_generator();
    let outputs = [
        generator.subschema_for::<Snapshot>(),
        generator.subschema_for::<Overview>(),
        generator.subschema_for::<ProgramReport>(),
        generator.subschema_for::<CommandReport>(),
        generator.subschema_for::<Diff>(),
        generator.subschema_for::<crate::selftest::Selftest>(),
        generator.subschema_for::<RecordingLine>(),
    ];
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON of whylate, schema 1",
        "description": "A line of --json is a Snapshot (sources), an Overview (whylate), a ProgramReport (-p, --comm, \
            --cgroup), a CommandReport (run, import), a Diff (diff) or a Selftest (selftest). A line of a recording is a \
            Snapshot or a RecordingLine. Fields may be added, and none are removed or renamed.",
        "anyOf": outputs,
        "$defs": in_words(generator.take_definitions(true).into()),
    })
}

/// Turns comments of the code into descriptions of JSON: without links, and with timestamps as they are written.
fn in_words(value: Value) -> Value {
    match value {
        Value::Array(all) => all.into_iter().map(in_words).collect(),
        Value::Object(all) => all
            .into_iter()
            .map(|(name, value)| match value {
                Value::String(text) if name == "description" => {
                    let text =
                        text.replace("[`", "`").replace("`]", "`").replace("`None`", "absent").replace('\n', " ");
                    (name, text.replace(", in nanoseconds since 1970 (UTC)", ", as RFC 3339 in UTC").into())
                }
                value => (name, in_words(value)),
            })
            .collect(),
        value => value,
    }
}

/// Returns the committed schema.
fn committed() -> Value {
    let text = fs::read_to_string(PATH).expect("docs/schema-1.json");
    serde_json::from_str(&text).expect("it is JSON")
}

#[test]
fn committed_schema_is_that_of_the_types() {
    let generated = generated();
    if std::env::var_os("WHYLATE_BLESS").is_some() {
        let text = serde_json::to_string_pretty(&generated).expect("JSON");
        fs::write(PATH, text + "\n").expect("written");
    }
    assert!(
        committed() == generated,
        "docs/schema-1.json is stale: WHYLATE_BLESS=1 cargo test -p whylate-model schema"
    );
}

/// Returns an object with all optional fields.
fn object() -> Object {
    let text = || Some("text".to_owned());
    Object {
        kind: ObjectKind::AnyOf,
        path: text(),
        is_deleted: true,
        inode: Some(1),
        local: text(),
        remote: text(),
        state: text(),
        address: Some(2),
        id: Some(3),
        process: text(),
        symbol: text(),
        lock: Some(crate::holders::Lock::Mutex),
        mount: text(),
        expires_in_ns: Some(4),
        timeout_ns: Some(5),
        peers: vec![Peer { process: Holder { who: "server:5".to_owned(), ..Holder::default() }, others: 6 }],
        other_peers: 7,
        any_of: vec![Object::new(ObjectKind::Pipe)],
        other_objects: 8,
    }
}

/// Returns a snapshot with all optional fields.
fn full(source: &str) -> Snapshot {
    let labels = || BTreeMap::from([("name".to_owned(), "value".to_owned())]);
    let frames = || vec!["inner".to_owned(), "outer".to_owned()];
    let histogram: Histogram = [1, 5_000, 1_000_000_000_000].into_iter().collect();
    let series = Series {
        labels: labels(),
        histograms: BTreeMap::from([("latency".to_owned(), histogram.clone())]),
        steps: BTreeMap::from([("latency".to_owned(), Steps { step_ns: 1_000, counts: vec![1, 2], over: 3 })]),
        values: BTreeMap::from([("share".to_owned(), 0.5), ("count".to_owned(), 7.0)]),
    };
    let stack = Stack {
        labels: labels(),
        state: "D".to_owned(),
        samples: 3,
        weight_ns: 4,
        waits: 2,
        wait: Some(Wait { class: WaitClass::Lock, rule: "rule".to_owned() }),
        age: histogram,
        kernel: frames(),
        user: frames(),
        waker: Some(Waker { by: WokenBy::Thread, labels: labels(), kernel: frames(), user: frames() }),
        waits_for: Some(Chain::default()),
        object: Some(object()),
    };
    let cgroup = Cgroup { path: "/a".to_owned(), container: Some("f".repeat(64)) };
    let segment = PathSegment {
        ns: 5,
        kind: CauseKind::Running,
        who: "server:5".into(),
        ready: Some("client:6".into()),
        via: Some("read".to_owned()),
        waiter: Some("client:6".into()),
        stack: frames(),
        stop: Some(crate::wait::Stop::Signal),
        depth: 1,
        is_member: true,
        object: Some(Box::new(object())),
        timeouts: 2,
        ..PathSegment::default()
    };
    let late = LateEvent {
        subject: "CPU 3".to_owned(),
        labels: labels(),
        latency_ns: 5,
        at_most_ns: Some(6),
        phases: vec![("irq".to_owned(), 5)],
        stack: frames(),
        inside: frames(),
        causes: vec![Cause { stack: frames(), cgroup: Some(cgroup), ..Cause::new(CauseKind::Thread, "server:5", 5) }],
        path: vec![segment],
        evidence: Some(Box::new(Evidence::Timer(TimerEvidence::default()))),
        ..LateEvent::default()
    };
    let sleeper = Sleeper {
        who: "job:7".into(),
        process: Some("job:6".to_owned()),
        asleep_ns: 5_000_000_000,
        waits_in: Some("io_schedule".to_owned()),
        class: WaitClass::Disk,
    };
    Snapshot {
        pid_namespace: Some(4_026_531_836),
        series: vec![series],
        stacks: vec![stack],
        late: vec![late],
        uninterruptible: vec![sleeper],
        unexplained: Unexplained { events: 1, total_ns: 2, recorded: None },
        lost: BTreeMap::from([("unmatched".to_owned(), 3)]),
        probe: Probe { run_ns: 1, runs: 1 },
        ..Snapshot::new(source, "made", "web1", 1_795_252_440_123_000_000)
    }
}

#[test]
fn snapshots_of_each_source_are_valid() {
    let root = committed();
    for card in CARDS {
        for snapshot in [full(card.name), Snapshot::new(card.name, "made", "web1", 0)] {
            let value = serde_json::to_value(&snapshot).expect("JSON");
            assert_eq!(validate::check(&root, "Snapshot", &value), Ok(()), "{}", card.name);
        }
    }
}

#[test]
fn other_lines_and_outputs_are_valid() {
    let root = committed();
    let valid = |definition: &str, value: Value| assert_eq!(validate::check(&root, definition, &value), Ok(()));
    let of = |line: Line| serde_json::to_value(&line).expect("JSON");
    for line in [
        Line::Header(Header { every_ns: Some(1), pid_namespace: Some(2), ..Header::default() }),
        Line::Account(Account::default()),
        Line::Clock(Clock::default()),
        Line::Gap(Gap::default()),
        Line::Kept(Kept { detail: "cpu.some".to_owned(), ..Kept::default() }),
        Line::End(End::default()),
    ] {
        valid("RecordingLine", of(line));
    }
    valid("Overview", json!(Overview::default()));
    let unfinished = vec![UnfinishedWait { waiter: "client:6".into(), via: "read".to_owned(), object: object() }];
    valid("ProgramReport", json!(ProgramReport { unfinished, ..ProgramReport::default() }));
    valid("CommandReport", json!(CommandReport { is_born: Some(true), ..CommandReport::default() }));
    valid("Diff", json!(Diff::default()));
}

#[test]
fn validator_refuses_what_the_schema_does_not_have() {
    let root = committed();
    let valid = json!(full("wq"));
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut value = valid.clone();
        change(&mut value);
        validate::check(&root, "Snapshot", &value).expect_err("invalid")
    };
    assert!(refused(&|value| value["schemas"] = json!(1)).contains("no field schemas"));
    assert!(refused(&|value| value["duration_ns"] = json!(1.5)).contains("1.5 is no"));
    assert!(refused(&|value| value["duration_ns"] = json!(-1)).contains("-1 is below 0"));
    assert!(refused(&|value| value["late"][0]["causes"][0]["kind"] = json!("magic")).contains("causes[0].kind"));
    assert!(
        refused(&|value| value["late"][0]["path"][0]["why"] = json!(1))
            .contains("path[0]: the schema has no field why")
    );
    assert!(refused(&|value| drop(value.as_object_mut().and_then(|all| all.remove("lost")))).contains("lost"));
}
