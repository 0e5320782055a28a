//! Listings that read rows lazily, page by page.

use std::{collections::VecDeque, iter};

use super::error::StoreError;

/// Rows of one page: a listing holds no lock between two pages.
pub(crate) const PAGE: usize = 256;

/// Returns the rows of all pages. `next` reads the page after a row.
pub(crate) fn pages<R: Clone>(
    mut next: impl FnMut(Option<&R>) -> Result<Vec<R>, StoreError>,
) -> impl Iterator<Item = Result<R, StoreError>> {
    let (mut page, mut last, mut done) = (VecDeque::new(), None, false);
    iter::from_fn(move || {
        if page.is_empty() && !done {
            match next(last.as_ref()) {
                Ok(rows) => {
                    done = rows.len() < PAGE;
                    last = rows.last().cloned();
                    page = rows.into();
                }
                Err(e) => {
                    done = true;
                    return Some(Err(e));
                }
            }
        }
        page.pop_front().map(Ok)
    })
}
