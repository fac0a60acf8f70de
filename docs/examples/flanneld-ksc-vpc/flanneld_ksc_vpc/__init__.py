"""A backend for flanneld that keeps routes in a VPC of Kingsoft Cloud."""
