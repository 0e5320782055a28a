//! Listings that read rows as they are asked for.

use std::collections::VecDeque;

use super::error::StoreError;

/// How many rows are read at once: a listing holds no lock between two pages.
pub(crate) const PAGE: usize = 256;

/// An iterator over pages: each next page begins after the last row of the one before.
pub(crate) struct Pages<R, F> {
    next: F,
    page: VecDeque<R>,
    last: Option<R>,
    done: bool,
}

impl<R, F: FnMut(Option<&R>) -> Result<Vec<R>, StoreError>> Pages<R, F> {
    pub(crate) fn new(next: F) -> Self {
        Self {
            next,
            page: VecDeque::new(),
            last: None,
            done: false,
        }
    }
}

impl<R: Clone, F: FnMut(Option<&R>) -> Result<Vec<R>, StoreError>> Iterator for Pages<R, F> {
    type Item = Result<R, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.page.is_empty() && !self.done {
            match (self.next)(self.last.as_ref()) {
                Ok(page) => {
                    self.done = page.len() < PAGE;
                    self.last = page.last().cloned();
                    self.page = page.into();
                }
                Err(e) => {
                    self.done = true;
                    return Some(Err(e));
                }
            }
        }
        self.page.pop_front().map(Ok)
    }
}
