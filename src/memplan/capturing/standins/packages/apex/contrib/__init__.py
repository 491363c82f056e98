"""Parts of Apex that are built one by one."""
