// SPDX-License-Identifier: MIT OR Apache-2.0
//! One account of the CPUs for several sources of a process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::Kept;
use crate::source::AttachError;

thread_local! {
    /// The account of the sources that are being attached together by this thread.
    static ATTACHING: RefCell<Option<Together>> = const { RefCell::new(None) };
}

/// Sources that are attached together have one account of who has each CPU, which costs as much as for one of them. The first source that
/// needs it says which timers it watches: one that has timers of its own on each CPU comes first, and they are started once then.
#[derive(Clone, Default)]
pub struct Together {
    account: Rc<RefCell<Option<Rc<RefCell<Kept>>>>>,
}

impl Together {
    /// Has sources that are attached meanwhile share the account.
    pub fn attach<T>(&self, attach: impl FnOnce() -> T) -> T {
        /// Puts back what was before, also when `attach` panics.
        struct Before(Option<Together>);
        impl Drop for Before {
            fn drop(&mut self) {
                ATTACHING.set(self.0.take());
            }
        }
        let _before = Before(ATTACHING.replace(Some(self.clone())));
        attach()
    }

    /// Lets the account run, once all sources are attached: until then their late events have no causes.
    ///
    /// # Errors
    /// When the kernel does not let its programs in.
    pub fn begin(&self) -> Result<(), AttachError> {
        match &*self.account.borrow() {
            Some(kept) => kept.borrow_mut().attach(true),
            None => Ok(()),
        }
    }

    /// Events that the account has lost since the last call, by reason.
    pub fn take_lost(&self) -> BTreeMap<String, u64> {
        let account = self.account.borrow();
        let lost = account.iter().flat_map(|kept| kept.borrow_mut().take_lost());
        lost.map(|(reason, count)| (reason.to_owned(), count)).collect()
    }
}

/// The account of the sources that are being attached together; `None` where this one is attached alone.
pub(super) fn account(
    load: impl FnOnce() -> Result<Kept, AttachError>,
) -> Result<Option<Rc<RefCell<Kept>>>, AttachError> {
    let Some(together) = ATTACHING.with_borrow(Option::clone) else { return Ok(None) };
    let known = together.account.borrow().clone();
    let kept = match known {
        Some(kept) => kept,
        None => Rc::new(RefCell::new(load()?)),
    };
    Ok(Some(Rc::clone(together.account.borrow_mut().insert(kept))))
}
