// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of actors, which keep the thread that they name.

use std::cmp::Ordering;
use std::convert::Infallible;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io::Write as _;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Flag in the TID of a thread outside the observer's PID namespace, added to its TID in the initial namespace, which
/// is below 2^22. So threads outside have unique TIDs that differ from all inside.
pub const OUTSIDE: u32 = 1 << 31;

/// Formats a TID or PID.
pub fn number(tid: u32) -> String {
    if tid & OUTSIDE != 0 { "outside".to_owned() } else { tid.to_string() }
}

/// Name of an actor: text that names at most one thread or cgroup, such as `dd:4711`, `vda (read by dd:4711)` or `CPU 1`.
#[derive(Clone, Debug, Default)]
pub struct ActorName {
    /// Text before the thread or cgroup, or all of the text.
    before: String,
    named: Option<Named>,
    after: String,
}

/// What a name names beside text.
#[derive(Clone, Debug)]
enum Named {
    /// A thread; without a TID, all threads of that `comm`.
    Thread { comm: String, tid: Option<u32> },
    /// All threads of a cgroup, by its path.
    Cgroup { path: String },
}

impl ActorName {
    /// Names a thread. Threads of one `comm` outside the PID namespace have equal names.
    pub fn thread(comm: impl Into<String>, tid: u32) -> Self {
        let tid = if tid & OUTSIDE != 0 { OUTSIDE } else { tid };
        ActorName::from(Named::Thread { comm: comm.into(), tid: Some(tid) })
    }

    /// Names all threads of one `comm`.
    pub fn program(comm: impl Into<String>) -> Self {
        ActorName::from(Named::Thread { comm: comm.into(), tid: None })
    }

    /// Names all threads of a cgroup, by its path; as `itself` beside a victim in the same one.
    pub fn cgroup(path: impl Into<String>, is_own: bool) -> Self {
        let after = if is_own { " (itself)".to_owned() } else { String::new() };
        ActorName { after, ..ActorName::from(Named::Cgroup { path: path.into() }) }
    }

    /// Returns the name with text around it.
    pub fn within(self, before: &str, after: &str) -> Self {
        match self.named {
            None => format!("{before}{self}{after}").into(),
            named => ActorName { before: format!("{before}{}", self.before), named, after: self.after + after },
        }
    }

    /// Returns whether the actor is a thread, or all threads of one `comm`.
    pub fn is_thread(&self) -> bool {
        self.comm().is_some() && self.before.is_empty() && self.after.is_empty()
    }

    /// Returns whether the actor is a cgroup.
    pub fn is_cgroup(&self) -> bool {
        matches!(self.named, Some(Named::Cgroup { .. }))
    }

    /// Returns the `comm` of the thread.
    pub fn comm(&self) -> Option<&str> {
        if let Some(Named::Thread { comm, .. }) = &self.named { Some(comm) } else { None }
    }

    /// Returns the TID of the thread.
    pub fn tid(&self) -> Option<u32> {
        if let Some(Named::Thread { tid, .. }) = self.named { tid } else { None }
    }

    /// Returns the name without a TID.
    pub fn by_name(&self) -> Self {
        let mut name = self.clone();
        if let Some(Named::Thread { tid, .. }) = &mut name.named {
            *tid = None;
        }
        name
    }

    /// Returns the text of the thread or cgroup without a TID.
    fn named_text(&self) -> &str {
        match &self.named {
            None => "",
            Some(Named::Thread { comm: text, .. } | Named::Cgroup { path: text }) => text,
        }
    }

    /// Returns whether the other name is this one without a TID.
    pub fn is_named(&self, name: &Self) -> bool {
        self.bytes_with(None).eq(name.bytes())
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        self.bytes_with(self.tid())
    }

    /// Iterates over the bytes of the text with this TID. Names are compared for each interval, so nothing is allocated.
    fn bytes_with(&self, tid: Option<u32>) -> impl Iterator<Item = u8> {
        // A colon, and ten digits or `outside`.
        let mut suffix = [0; 11];
        let mut rest = &mut suffix[..];
        let written = match tid {
            None => Ok(()),
            Some(tid) if tid & OUTSIDE != 0 => write!(rest, ":outside"),
            Some(tid) => write!(rest, ":{tid}"),
        };
        let unused = rest.len();
        debug_assert!(written.is_ok(), "{tid:?} does not fit");
        let suffix = suffix.into_iter().take(suffix.len() - unused);
        self.before.bytes().chain(self.named_text().bytes()).chain(suffix).chain(self.after.bytes())
    }

    /// Normalizes the name, so that threads of one pool, or of different runs, are equal: strips the TID, and replaces
    /// numbers and hashes after a character that is neither letter nor digit. `kworker/0:1-events:77` becomes
    /// `kworker/*:*-events`, `vda (read by dd:4711)` becomes `vda (read by dd)`, and `lto b1b1vzddrzc:5` `lto *`.
    pub fn alike(&self) -> Self {
        let mut begins_word = false;
        let mut normalized = |text: &str| {
            let mut normalized = String::with_capacity(text.len());
            let mut rest = text;
            while let Some(first) = rest.chars().next() {
                let word = &rest[..rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len())];
                let (is_masked, length) = match word {
                    "" => (false, first.len_utf8()),
                    word if begins_word && is_hash(word) => (true, word.len()),
                    word if begins_word && first.is_ascii_digit() => {
                        (true, word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len()))
                    }
                    word => (false, word.len()),
                };
                if !is_masked {
                    normalized.push_str(&rest[..length]);
                } else if !normalized.ends_with('*') {
                    normalized.push('*');
                }
                // What follows a number within a word is the rest of the word.
                begins_word = word.is_empty();
                rest = &rest[length..];
            }
            normalized
        };
        let before = normalized(&self.before);
        let text = normalized(self.named_text());
        let named = self.named.as_ref().map(|named| match named {
            Named::Thread { .. } => Named::Thread { comm: text, tid: None },
            Named::Cgroup { .. } => Named::Cgroup { path: text },
        });
        ActorName { before, named, after: normalized(&self.after) }
    }
}

/// Returns whether a word is a hash rather than a name: letters and digits, long, or shorter and hexadecimal.
pub(crate) fn is_hash(word: &str) -> bool {
    let has = |is: fn(&char) -> bool| word.chars().any(|c| is(&c));
    let is_long = word.len() >= 10 || (word.len() >= 8 && word.chars().all(|c| c.is_ascii_hexdigit()));
    is_long && has(char::is_ascii_digit) && has(char::is_ascii_alphabetic)
}

impl From<Named> for ActorName {
    fn from(named: Named) -> Self {
        ActorName { named: Some(named), ..ActorName::default() }
    }
}

/// Takes text that names no thread.
impl<T: Into<String>> From<T> for ActorName {
    fn from(text: T) -> Self {
        ActorName { before: text.into(), ..ActorName::default() }
    }
}

impl<T: AsRef<str>> PartialEq<T> for ActorName {
    fn eq(&self, text: &T) -> bool {
        self.bytes().eq(text.as_ref().bytes())
    }
}

/// Compares the texts: a name from a recording equals the name that was recorded, even if it was read as another
/// thread's, or as text.
impl PartialEq for ActorName {
    fn eq(&self, other: &Self) -> bool {
        self.bytes().eq(other.bytes())
    }
}

impl Eq for ActorName {}

impl Hash for ActorName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes().for_each(|byte| state.write_u8(byte));
        // No byte of a text.
        state.write_u8(0xff);
    }
}

/// Orders names as their texts.
impl Ord for ActorName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes().cmp(other.bytes())
    }
}

impl PartialOrd for ActorName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ActorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.before, self.named_text())?;
        self.tid().map_or(Ok(()), |tid| write!(f, ":{}", number(tid)))?;
        f.write_str(&self.after)
    }
}

/// Reads a name in a recording.
impl FromStr for ActorName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        // `dd:4711`, `dd:4711 (writes)`, `vda (read by dd:4711)` or `timeout in poll (dd:4711)`.
        let (who, how) = text.strip_suffix(')').and_then(|rest| rest.split_once(" (")).unwrap_or((text, ""));
        let by = how.rsplit_once(" by ").map_or(how, |(_, by)| by);
        let parts = [(0, who), ((text.len() - by.len()).saturating_sub(1), by)];
        let name = parts.into_iter().find_map(|(at, part)| {
            let (comm, end) = part.rsplit_once(':')?;
            let tid = if end == "outside" { OUTSIDE } else { end.parse().ok()? };
            // A device without a name is labeled `259:3`.
            let is_thread = number(tid) == end && comm.parse::<u32>().is_err();
            is_thread.then(|| ActorName::thread(comm, tid).within(&text[..at], &text[at + part.len()..]))
        });
        Ok(name.unwrap_or_else(|| text.into()))
    }
}

impl Serialize for ActorName {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
impl schemars::JsonSchema for ActorName {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ActorName".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        String::json_schema(generator)
    }
}

impl<'de> Deserialize<'de> for ActorName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Ok(name) = String::deserialize(from)?.parse();
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> ActorName {
        let Ok(name) = text.parse();
        name
    }

    #[test]
    fn strips_tids() {
        for (called, name) in [
            ("dd:4711", "dd"),
            ("a:b:outside", "a:b"),
            ("vda (write by dd:4711)", "vda (write by dd)"),
            ("timeout in poll (dd:4711)", "timeout in poll (dd)"),
            ("kworker/0:1-events:77", "kworker/0:1-events"),
            ("CPU 1", "CPU 1"),
            ("(sd-pam):9", "(sd-pam)"),
            ("dd:4711 (writes)", "dd (writes)"),
            ("259:3", "259:3"),
            ("259:3 (write by dd:outside)", "259:3 (write by dd)"),
            ("nvme0n1 (no free request)", "nvme0n1 (no free request)"),
        ] {
            assert_eq!(read(called).by_name(), name);
        }
    }

    #[test]
    fn normalizes_names_of_pools() {
        for (called, name) in [
            ("kworker/0:1-events:77", "kworker/*:*-events"),
            ("kworker/u8:13:77", "kworker/u8:*"),
            ("iou-sqp-4711:4712", "iou-sqp-*"),
            ("dd:outside", "dd"),
            ("vda (read by dd:4711)", "vda (read by dd)"),
            ("vda (read by 7z:4711)", "vda (read by *z)"),
            ("dd:4711 (writes)", "dd (writes)"),
            ("259:3", "259:*"),
            ("run queue of CPU 12", "run queue of CPU *"),
            ("opt 4lgyvyourp7:21840", "opt *"),
            ("lto b1b1vzddrzc:5", "lto *"),
            ("pod-3f2a9c1b:5", "pod-*"),
            ("jbd2/nvme0n1p1-8:5", "jbd2/nvme0n1p1-*"),
            ("docker-proxy:5", "docker-proxy"),
            ("cc1:5", "cc1"),
            ("2to3", "2to3"),
            ("", ""),
            (")", ")"),
            ("*12", "*"),
        ] {
            assert_eq!(read(called).alike(), name, "{called}");
        }
    }

    #[test]
    fn thread_outside_namespace_has_no_tid_in_text() {
        assert_eq!(ActorName::thread("kworker/0:1", 77), "kworker/0:1:77");
        assert_eq!(ActorName::thread("dd", OUTSIDE | 4_194_303), "dd:outside");
    }

    proptest! {
        #[test]
        fn text_survives_reading(text in "([a-z0-9:() +]|:[0-9]{1,3}| by | \\(|:outside){0,9}\\)?") {
            prop_assert_eq!(read(&text), text);
        }

        #[test]
        fn names_equal_those_read_from_their_texts(comm in "[a-z0-9:() +]{1,15}", tid in 1..1_u32 << 22) {
            let hash = |name: &ActorName| BuildHasherDefault::<DefaultHasher>::default().hash_one(name);
            for name in [ActorName::thread(&comm, tid), ActorName::program(&comm), ActorName::thread(&comm, OUTSIDE)] {
                let again = read(&name.to_string());
                prop_assert_eq!(&again, &name);
                prop_assert_eq!(hash(&again), hash(&name));
                prop_assert_eq!(name.cmp(&again), Ordering::Equal);
                prop_assert!(name.is_named(&name.by_name()) && !ActorName::thread(&comm, 7).is_named(&name) || name.tid().is_none());
            }
        }

        #[test]
        fn names_are_ordered_as_their_texts(one in "[a:(1_ )]{0,6}", other in "[a:(1_ )]{0,6}") {
            prop_assert_eq!(read(&one).cmp(&read(&other)), one.cmp(&other));
        }

        #[test]
        fn names_round_trip(comm in "[c-x][c-x0-9:/) -]{0,14}", tid in 1..1_u32 << 22) {
            for (before, after) in [("", ""), ("vda (read by ", ")"), ("", " (writes)"), ("timeout in poll (", ")")] {
                let name = ActorName::thread(&comm, tid).within(before, after);
                prop_assert_eq!(read(&name.to_string()), name);
            }
        }
    }
}
