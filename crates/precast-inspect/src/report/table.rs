//! The parts that the tables of a report share.

use maud::{Markup, html};

/// Renders the heads of columns, by which a table is sorted; `true` for a column of numbers.
pub(super) fn heads(names: &[(&str, bool)]) -> Markup {
    html! {
        thead { tr { @for (name, number) in names {
            th class=[number.then_some("n")] scope="col" { button type="button" { (name) } }
        } } }
    }
}

/// Renders the field that filters the rows of a table.
pub(super) fn filter(table: &str, label: &str) -> Markup {
    html! {
        div.filter {
            label for=(format!("{table}-filter")) { (label) }
            input id=(format!("{table}-filter")) data-table=(table) type="search" placeholder="as encode batch=8";
            output.soft {}
        }
    }
}
