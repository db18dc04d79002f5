// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of several processes, in a directory in place of /sys.

use proptest::prelude::*;

use super::*;

fn setting(directory: &Path, name: &str, value: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, value).expect("written");
    path
}

fn content(path: &Path) -> String {
    fs::read_to_string(path).expect("read").trim().to_owned()
}

fn recovered(records: &Path, place: &Path) -> PutBack {
    recover_from(records, &[place.to_owned()])
}

/// Ends an owner as SIGKILL does: the kernel closes its files, and nothing is restored.
fn kill(mut owner: Restore) {
    owner.owner = None;
}

fn is_empty(records: &Path) -> bool {
    fs::read_dir(records).expect("there").next().is_none()
}

#[test]
fn restores_settings_on_drop() {
    let directory = tempfile::tempdir().expect("a directory");
    let records = directory.path().join("records");
    let (a, b) = (setting(directory.path(), "a", "1\n"), setting(directory.path(), "b", "x\n"));
    let mut restore = Restore::recorded_in(&records);
    restore.set(&b, "x").expect("set");
    assert!(!records.exists(), "nothing has changed");
    for (path, value) in [(&a, "2"), (&a, "3"), (&b, "x")] {
        restore.set(path, value).expect("set");
    }
    assert_eq!((content(&a), content(&b)), ("3".to_owned(), "x".to_owned()));
    drop(restore);
    assert_eq!(content(&a), "1");
    assert!(is_empty(&records));
}

#[test]
fn restores_one_flag_of_a_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let options = setting(directory.path(), "options", "DEFAULTS OSNOISE_WORKLOAD NO_PANIC_ON_STOP\n");
    let mut restore = Restore::recorded_in(&directory.path().join("records"));
    restore.set_flag(&options, "PANIC_ON_STOP", false).expect("it is off already");
    restore.set_flag(&options, "OSNOISE_WORKLOAD", false).expect("set");
    assert_eq!(content(&options), "NO_OSNOISE_WORKLOAD");
    assert!(restore.set_flag(&options, "ANOTHER", true).is_err());
    drop(restore);
    // A plain file has only the last write; the kernel's lists all words.
    assert_eq!(content(&options), "OSNOISE_WORKLOAD");
}

/// Two overlapping measurements: the original value is restored when the last one ends, whichever that is.
#[test]
fn last_of_overlapping_runs_restores_original() {
    for (value_of_b, is_first_out, between) in
        [("3", true, "3"), ("3", false, "2"), ("2", true, "2"), ("2", false, "2")]
    {
        let directory = tempfile::tempdir().expect("a directory");
        let records = directory.path().join("records");
        let path = setting(directory.path(), "a", "1");
        let [mut a, mut b] = [(); 2].map(|()| Restore::recorded_in(&records));
        a.set(&path, "2").expect("set");
        b.set(&path, value_of_b).expect("set");
        assert_eq!(content(&path), value_of_b);
        let (first, last) = if is_first_out { (a, b) } else { (b, a) };
        drop(first);
        assert_eq!(content(&path), between, "{value_of_b} {is_first_out}");
        drop(last);
        assert_eq!(content(&path), "1", "{value_of_b} {is_first_out}");
        assert!(is_empty(&records));
    }
}

#[test]
fn recovers_changes_of_killed_processes_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let records = directory.path().join("records");
    let (a, b) = (setting(directory.path(), "a", "1"), setting(directory.path(), "b", "1"));
    let mut living = Restore::recorded_in(&records);
    living.set(&b, "2").expect("set");
    let mut killed = Restore::recorded_in(&records);
    killed.set(&a, "2").expect("set");
    killed.set(&a, "3").expect("set");
    kill(killed);
    // A record of a setting elsewhere is not trusted.
    assert_eq!(recovered(&records, Path::new("/elsewhere")), PutBack::default());
    assert_eq!(content(&a), "3");
    let mut killed = Restore::recorded_in(&records);
    killed.set(&a, "4").expect("set");
    kill(killed);
    assert_eq!(recovered(&records, directory.path()), PutBack { settings: 1, ..PutBack::default() });
    assert_eq!((content(&a), content(&b)), ("3".to_owned(), "2".to_owned()));
    drop(living);
    assert_eq!(content(&b), "1");
    assert!(is_empty(&records));
}

/// A value that the administrator has set after a crash stays, and does not count as restored.
#[test]
fn keeps_value_changed_after_crash() {
    let directory = tempfile::tempdir().expect("a directory");
    let records = directory.path().join("records");
    let a = setting(directory.path(), "a", "1");
    let mut killed = Restore::recorded_in(&records);
    killed.set(&a, "2").expect("set");
    kill(killed);
    setting(directory.path(), "a", "7");
    assert_eq!(recovered(&records, directory.path()), PutBack::default());
    assert_eq!(content(&a), "7");
    assert!(is_empty(&records));
    // Also during a measurement.
    let mut restore = Restore::recorded_in(&records);
    restore.set(&a, "2").expect("set");
    setting(directory.path(), "a", "8");
    drop(restore);
    assert_eq!(content(&a), "8");
}

#[test]
fn failed_write_leaves_no_entry() {
    let directory = tempfile::tempdir().expect("a directory");
    let records = directory.path().join("records");
    let mut restore = Restore::recorded_in(&records);
    assert!(restore.set(&directory.path().join("absent"), "2").is_err());
    // Root may read it, but not write to it.
    assert!(restore.set(Path::new("/proc/version"), "2").is_err());
    assert!(restore.set(&setting(directory.path(), "a", "1"), "two\nlines").is_err());
    assert!(!records.join("settings").exists());
    drop(restore);
    assert!(is_empty(&records));
}

#[test]
fn removes_directory_on_drop_or_recovery() {
    let directory = tempfile::tempdir().expect("a directory");
    let (records, made) = (directory.path().join("records"), directory.path().join("made"));
    let mut restore = Restore::recorded_in(&records);
    restore.make_directory(&made).expect("made");
    assert!(made.is_dir() && Restore::recorded_in(&records).make_directory(&made).is_err());
    drop(restore);
    assert!(!made.exists());
    let mut killed = Restore::recorded_in(&records);
    killed.make_directory(&made).expect("made");
    kill(killed);
    assert_eq!(recovered(&records, Path::new("/elsewhere")), PutBack::default());
    assert!(made.is_dir());
    fs::remove_dir(&made).expect("removed");
    let mut killed = Restore::recorded_in(&records);
    killed.make_directory(&made).expect("made");
    kill(killed);
    assert_eq!(recovered(&records, directory.path()), PutBack { cgroups: 1, ..PutBack::default() });
    assert!(!made.exists() && is_empty(&records));
}

/// A file elsewhere is not our journal.
#[test]
fn does_not_follow_symlinks() {
    let directory = tempfile::tempdir().expect("a directory");
    let records = directory.path().join("records");
    let a = setting(directory.path(), "a", "1");
    let mut living = Restore::recorded_in(&records);
    living.set(&a, "2").expect("set");
    let elsewhere = directory.path().join("elsewhere");
    fs::write(&elsewhere, format!("1.0\tline\t{}\t7\t2\n", a.display())).expect("written");
    std::os::unix::fs::symlink(&elsewhere, records.join("1.0")).expect("made");
    assert_eq!(recovered(&records, directory.path()), PutBack::default());
    assert_eq!(content(&a), "2");
    fs::rename(records.join("settings"), directory.path().join("moved")).expect("moved");
    std::os::unix::fs::symlink(&elsewhere, records.join("settings")).expect("made");
    assert_eq!(recovered(&records, directory.path()), PutBack::default());
    assert_eq!(content(&a), "2");
    fs::rename(directory.path().join("moved"), records.join("settings")).expect("moved");
    drop(living);
    assert_eq!(content(&a), "1");
}

#[test]
fn rejects_directory_writable_by_others() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("set");
    assert!(!is_ours(directory.path()));
    let a = setting(directory.path(), "a", "1");
    let mut restore = Restore::recorded_in(directory.path());
    assert!(restore.set(&a, "2").is_err());
    assert_eq!(content(&a), "1");
}

/// Number of processes and of settings.
const PROCESSES: usize = 3;
const PATHS: usize = 2;

#[derive(Clone, Debug)]
enum Action {
    Begin {
        process: usize,
        path: usize,
        value: u32,
    },
    End(usize),
    Kill(usize),
    /// SIGKILL after the journal is written and before the setting is.
    KillBeforeWrite {
        process: usize,
        path: usize,
        value: u32,
    },
    /// SIGKILL after the settings are restored and before the journal is.
    KillAfterUndo(usize),
    Start,
    Administrator(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let (process, path, value) = (0..PROCESSES, 0..PATHS, 0..3_u32);
    let begin = (process.clone(), path.clone(), value);
    let action = prop_oneof![
        4 => begin.clone().prop_map(|(process, path, value)| Action::Begin { process, path, value }),
        2 => process.clone().prop_map(Action::End),
        1 => process.clone().prop_map(Action::Kill),
        1 => begin.prop_map(|(process, path, value)| Action::KillBeforeWrite { process, path, value }),
        1 => process.prop_map(Action::KillAfterUndo),
        1 => Just(Action::Start),
        1 => path.prop_map(Action::Administrator),
    ];
    prop::collection::vec(action, 1..24)
}

/// Expected state of the settings.
struct Model {
    /// The original value, or the administrator's latest.
    original: [u32; PATHS],
    /// Processes and the values they set, in order; the last one is in effect. `None`: a killed process.
    wanted: [Vec<(Option<usize>, u32)>; PATHS],
}

impl Model {
    fn stands(&self, path: usize) -> u32 {
        self.wanted[path].last().map_or(self.original[path], |&(_, value)| value)
    }

    /// Each access to the journal repairs what killed processes have left.
    fn remove(&mut self, own: Option<usize>) {
        for wanted in &mut self.wanted {
            wanted.retain(|(owner, _)| owner.is_some() && (own.is_none() || *owner != own));
        }
    }

    fn kill(&mut self, process: usize) {
        for (owner, _) in self.wanted.iter_mut().flatten() {
            *owner = owner.filter(|&owner| owner != process);
        }
    }
}

proptest! {
    // Each case has some hundred file accesses.
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn settings_match_model_after_any_actions(actions in actions()) {
        let directory = tempfile::tempdir().expect("a directory");
        let records = directory.path().join("records");
        let paths: [PathBuf; PATHS] = std::array::from_fn(|path| setting(directory.path(), &path.to_string(), "1"));
        let mut model = Model { original: [1; PATHS], wanted: Default::default() };
        let mut processes: [Option<Restore>; PROCESSES] = Default::default();
        let mut by_administrator = 1_000;
        let end = [Action::End(0), Action::End(1), Action::End(2), Action::Start];
        for action in actions.into_iter().chain(end) {
            match action {
                Action::Begin { process, path, value } => {
                    let restore = processes[process].get_or_insert_with(|| Restore::recorded_in(&records));
                    restore.set(&paths[path], &value.to_string()).expect("set");
                    model.remove(None);
                    model.wanted[path].push((Some(process), value));
                }
                Action::End(process) => {
                    if processes[process].take().is_some_and(|restore| restore.owner.is_some()) {
                        model.remove(Some(process));
                    }
                }
                Action::Kill(process) => {
                    if let Some(restore) = processes[process].take() {
                        kill(restore);
                    }
                    model.kill(process);
                }
                Action::KillBeforeWrite { process, path, value } => {
                    let mut restore = processes[process].take().unwrap_or_else(|| Restore::recorded_in(&records));
                    let mut locked = Locked::new(&records).expect("locked");
                    locked.undo(None, &restore.places).expect("undone");
                    model.remove(None);
                    let setting = Setting::line(&paths[path]);
                    let (found, owner) = (setting.read().expect("read"), restore.owner(&locked).expect("named"));
                    let change = Change::Setting { setting, found, wrote: value.to_string() };
                    locked.journal.append(&records, Entry { owner, change }).expect("written");
                    kill(restore);
                    model.kill(process);
                }
                Action::KillAfterUndo(process) => {
                    let Some(restore) = processes[process].take() else { continue };
                    let Some((owner, _)) = &restore.owner else { continue };
                    let mut locked = Locked::new(&records).expect("locked");
                    let before = fs::read(records.join("settings")).unwrap_or_default();
                    locked.undo(Some(owner), &restore.places).expect("undone");
                    fs::write(records.join("settings"), before).expect("written");
                    kill(restore);
                    model.remove(Some(process));
                }
                Action::Start => {
                    recovered(&records, directory.path());
                    model.remove(None);
                }
                Action::Administrator(path) => {
                    by_administrator += 1;
                    setting(directory.path(), &path.to_string(), &by_administrator.to_string());
                    model.original[path] = by_administrator;
                    model.wanted[path].clear();
                }
            }
            for (path, name) in paths.iter().enumerate() {
                prop_assert_eq!(content(name), model.stands(path).to_string(), "setting {}", path);
            }
        }
        prop_assert!(!records.exists() || is_empty(&records));
    }
}
