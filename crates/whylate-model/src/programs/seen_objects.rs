// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chooses the object that stands for many waits.

use crate::object::Object;

/// Maximum number of objects; further ones are only counted.
const MAX_OBJECTS: usize = 8;

/// Objects that were read during some of the waits of one kind.
#[derive(Clone, Debug, Default)]
pub(super) struct SeenObjects {
    /// Each object with the number of waits for it.
    seen: Vec<(Object, u64)>,
    /// Number of waits for further objects.
    others: u64,
}

impl SeenObjects {
    /// Adds waits for an object.
    pub fn add(&mut self, object: Object, waits: u64) {
        let has_room = self.seen.len() < MAX_OBJECTS;
        match self.seen.iter_mut().find(|(known, _)| known.is_same(&object)) {
            Some((known, sum)) => {
                known.keep_common(&object);
                *sum += waits;
            }
            None if has_room => self.seen.push((object, waits)),
            None => self.others += waits,
        }
    }

    /// Adds the objects of other waits of the same kind.
    pub fn absorb(&mut self, other: SeenObjects) {
        other.seen.into_iter().for_each(|(object, waits)| self.add(object, waits));
        self.others += other.others;
    }

    /// Returns the number of waits in which an object was read.
    pub fn waits(&self) -> u64 {
        self.others + self.seen.iter().map(|(_, waits)| waits).sum::<u64>()
    }

    /// Returns the object of more than half of the waits, with their number. Waits are read at times that do not depend on
    /// them, so that longer ones are read more often, and the object is that of most of the time.
    pub fn into_main(self) -> Option<(Object, u64)> {
        let all = self.waits();
        self.seen.into_iter().find(|(_, waits)| waits * 2 > all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::ObjectKind;

    fn main_of(objects: &[Object]) -> Option<(Object, u64)> {
        let mut seen = SeenObjects::default();
        objects.iter().for_each(|object| seen.add(object.clone(), 1));
        seen.into_main()
    }

    #[test]
    fn object_of_most_waits_stands_for_all() {
        let [one, other] = ["/a", "/b"].map(|path| Object::with_path(ObjectKind::FileLock, path));
        assert_eq!(main_of(&[other.clone(), one.clone(), one.clone()]), Some((one.clone(), 2)));
        assert_eq!(main_of(&[one.clone(), other.clone()]), None, "neither has the majority");
        // Objects without room count too.
        let many: Vec<Object> =
            (0..20).map(|number| Object::with_path(ObjectKind::File, format!("/{number}"))).collect();
        assert_eq!(main_of(&[&many[..], &[many[0].clone()]].concat()), None);
    }

    #[test]
    fn connections_to_one_address_are_one_object() {
        let tcp = |port: u16| Object {
            local: Some(format!("127.0.0.1:{port}")),
            remote: Some("127.0.0.1:80".to_owned()),
            ..Object::new(ObjectKind::Tcp)
        };
        let (object, waits) = main_of(&[tcp(1), tcp(2)]).expect("one object");
        assert_eq!((object.local, waits), (None, 2));
    }
}
